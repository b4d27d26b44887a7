"""Measure how compile time grows with depth: python -m benchmarks.compile.

All layers run in one `lax.scan`, so compiling 48 layers should take hardly longer than
compiling 6. The program compiles the gradient of a narrow model without a cache. The
two depths alternate, so that other load on the machine affects both equally. The
results are medians of three.
"""

import statistics
import time
from dataclasses import replace

import jax
import jax.numpy as jnp

from model.catalog import MODEL_PARTS
from model.config import ModelConfig
from model.execution import Execution
from model.gpt import abstract_gpt, bind, params_of

DEPTHS = (6, 48)
REPEATS = 3
CONFIG = ModelConfig(embed_dim=32, num_heads=2, vocab_size=128)


def seconds(num_layers: int) -> float:
    jax.clear_caches()
    model = abstract_gpt(replace(CONFIG, num_layers=num_layers), MODEL_PARTS)
    execution = Execution()

    def loss(params, tokens):
        bound = bind(model, params)
        positions = jnp.arange(tokens.shape[1])[None]
        x, *_ = bound.features(tokens, positions, None, execution)
        return bound.logits(x, execution).mean()

    started = time.perf_counter()
    tokens = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    jax.jit(jax.grad(loss)).lower(params_of(model), tokens).compile()
    return time.perf_counter() - started


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    seconds(2)  # Pays the costs that only a first compilation has.
    times = [[seconds(depth) for depth in DEPTHS] for _ in range(REPEATS)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    for depth, median in zip(DEPTHS, medians, strict=True):
        print(f"{depth:2} layers: {median:.2f} s")
    print(f"ratio: {medians[-1] / medians[0]:.2f}")


if __name__ == "__main__":
    main()
