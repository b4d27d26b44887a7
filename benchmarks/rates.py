"""Train one model at several learning rates and seeds, all at once on one device.

    python -m benchmarks.rates --json rates.json --part transfer
    python -m benchmarks.rates --json rates.json --part defaults --text shakespeare.txt

transfer  AdamW and Muon over widths and depths, with and without
          optimizer.transfer=completep. Where is the best rate?
defaults  forms of Muon, and AdamW, on two texts at two widths

A sweep is one program: the product's training step, vectorized over rates and seeds, in
a scan over steps. The data, its order and the validation loss are those of
`python -m train`. On a GPU, programs compile side by side. The JSON file keeps
each sweep as soon as it is known; a sweep that is in the file already is skipped.
benchmarks/rates_chart.py draws the file's transfer sweeps.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from benchmarks.rates_chart import vertex
from data.batch import Batch
from data.batches import Order, validation_batches
from data.catalog import text_store
from data.encoding import padded_vocab_size
from data.sources import encoding_of, open_sources
from data.storage import write_atomically
from train.cli.command import compose
from train.config import Config
from train.core.eval_step import make_eval_step
from train.core.step import make_train_step
from train.resolve.program import ConfiguredProgram, make_program, settle
from train.runtime import set_up

NUM_CHUNKS = 4  # calls of the compiled scan in a run
VALIDATION_BATCHES = 40
BASE_WIDTH = 64
BASE_DEPTH = 4
HEAD_DIM = 16


class Sweep(NamedTuple):
    """A config, and factors on its learning rates. Each factor trains each seed."""

    name: str
    overrides: tuple[str, ...]
    factors: tuple[float, ...]
    seeds: int = 3


def model_keys(width: int, depth: int) -> tuple[str, ...]:
    """Return the keys of a model of this width and depth, whose heads have 16 dims."""
    return (
        f"model.embed_dim={width}",
        f"model.num_layers={depth}",
        f"model.num_heads={width // HEAD_DIM}",
    )


def halves(first: int, last: int) -> tuple[float, ...]:
    """Return powers of two, with exponents first/2 to last/2 in steps of a half."""
    return tuple(2 ** (n / 2) for n in range(first, last + 1))


def transfer_sweeps(steps: int) -> Iterator[Sweep]:
    """Yield AdamW and Muon at all sizes, with and without transfer."""
    run = (f"train.num_steps={steps}", "schedule=linear", "model.token_shift=none")
    adamw = ("optimizer=adamw", "optimizer.learning_rate=0.0078")
    optimizers = {
        "adamw": (*adamw, "optimizer.weight_decay=0.1"),
        "muon_rms": ("optimizer=muon_rms", *_both_rates(0.0125)),
        "muon": ("optimizer=muon",),
    }
    sizes = [(64, 4), (128, 4), (256, 4), (64, 8), (64, 16)]
    for name, optimizer in optimizers.items():
        for width, depth in sizes:
            keys = (*run, *optimizer, *model_keys(width, depth))
            is_base = (width, depth) == (BASE_WIDTH, BASE_DEPTH)
            title = f"{name} {width}x{depth}"
            yield Sweep(title, keys, halves(-5 if is_base else -8, 5))
            if not is_base:
                base = f"optimizer.base_width={BASE_WIDTH}"
                rules = ("optimizer.transfer=completep", base)
                rules = (*keys, *rules, f"optimizer.base_depth={BASE_DEPTH}")
                yield Sweep(f"{title} completep", rules, halves(-5, 5))


def _both_rates(rate: float) -> tuple[str, ...]:
    return (f"optimizer.learning_rate={rate}", f"optimizer.muon_learning_rate={rate}")


def default_sweeps(text: str) -> Iterator[Sweep]:
    """Yield forms of Muon on two texts, with the settings of the default runs."""
    data = {
        "python": (),
        "shakespeare": ("experiment=shakespeare_best", f"data.path={text}"),
    }
    per_head = "optimizer.muon_per_head=true"
    forms = {
        "adamw": ("optimizer=adamw", "optimizer.learning_rate=0.004"),
        "spectral": (),
        "spectral per head": (per_head,),
        "spectral decay 0.1": ("optimizer.muon_weight_decay=0.1",),
        "rms": ("optimizer=muon_rms", *_both_rates(0.01)),
        "rms per head": ("optimizer=muon_rms", *_both_rates(0.01), per_head),
    }
    for source, source_keys in data.items():
        for width in (64, 128):
            size = (f"model.embed_dim={width}", "model.num_heads=4")
            for form, keys in forms.items():
                name = f"{source} {width} {form}"
                yield Sweep(name, (*source_keys, *size, *keys), halves(-3, 3))


class Prepared(NamedTuple):
    """A sweep's program and its data."""

    sweep: Sweep
    program: ConfiguredProgram
    batches: Batch  # int32 [steps, seeds, B, T] fields
    validation: Batch  # int32 [n, B, T] fields


def prepare(sweep: Sweep) -> Prepared:
    """Read the data of a sweep, and make its program for one device."""
    keys = ("model.attention=xla", "model.layer_unroll=1", *sweep.overrides)
    config = compose([*keys, "mesh=ddp"])
    config = settle(config, padded_vocab_size(encoding_of(config.data)))
    sources = open_sources(config.data, text_store)
    steps = config.train.num_steps
    orders = [Order(sources, config.data, seed) for seed in range(sweep.seeds)]
    batches = [[order.read(step) for order in orders] for step in range(steps)]
    validation = validation_batches(sources, config.data)
    validation = [batch for batch, _ in zip(validation, range(VALIDATION_BATCHES))]  # noqa: B905
    return Prepared(
        sweep,
        make_program(config, jax.devices()[:1]),
        _stack([_stack(step) for step in batches]),
        _stack(validation),
    )


def _stack(batches: Sequence[Batch]) -> Batch:
    return jax.tree.map(lambda *fields: np.stack(fields), *batches)


class Compiled(NamedTuple):
    """The programs of a sweep: initial states, some steps, and the validation loss."""

    prepared: Prepared
    init: Any
    steps: Any
    validate: Any
    compile_s: float


def compile_sweep(prepared: Prepared) -> Compiled:
    """Compile a sweep. States have leading dims [factors, seeds]."""
    sweep = prepared.sweep
    program = prepared.program
    start = time.perf_counter()
    factors = jnp.asarray(sweep.factors, jnp.float32)

    def init() -> Any:
        trees = [program.initial_state(seed) for seed in range(sweep.seeds)]
        shape = (len(factors),)
        states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, shape + x.shape), states)

    def step(factor: jax.Array, state: Any, batch: Batch) -> Any:
        schedule = program.optimizer.schedule
        optimizer = replace(program.optimizer, schedule=lambda n: factor * schedule(n))
        run = make_train_step(
            program.model, optimizer, program.execution, program.recipe, 0
        )
        state, metrics = run(state, batch)
        return state, metrics["loss"]

    over_seeds = jax.vmap(step, (None, 0, 0))
    over_all = jax.vmap(over_seeds, (0, 0, None))

    def run_steps(states: Any, batches: Batch) -> Any:
        return jax.lax.scan(partial(over_all, factors), states, batches)

    evaluate = make_eval_step(program.model, program.execution, program.recipe)

    def validate(states: Any, validation: Batch) -> jax.Array:
        def loss(params: Any) -> jax.Array:
            nats, targets = jax.lax.map(partial(evaluate, params), validation)
            return jnp.sum(nats) / jnp.sum(targets)

        return jax.vmap(jax.vmap(loss))(states.params)

    abstract = jax.eval_shape(init)
    chunk = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((len(x) // NUM_CHUNKS, *x.shape[1:]), x.dtype),
        prepared.batches,
    )
    steps = jax.jit(run_steps, donate_argnums=0).lower(abstract, chunk).compile()
    scores = jax.jit(validate).lower(abstract, prepared.validation).compile()
    initial = jax.jit(init).lower().compile()
    return Compiled(prepared, initial, steps, scores, time.perf_counter() - start)


def train(compiled: Compiled) -> dict[str, Any]:
    """Train all runs of a sweep; return their validation losses [factors][seeds]."""
    prepared = compiled.prepared
    sweep = prepared.sweep
    config = prepared.program.config
    start = time.perf_counter()
    states = compiled.init()
    size = config.train.num_steps // NUM_CHUNKS
    for chunk in range(NUM_CHUNKS):
        part = slice(chunk * size, (chunk + 1) * size)
        batches = jax.tree.map(lambda x, part=part: x[part], prepared.batches)
        states, _ = compiled.steps(states, batches)
    losses = np.asarray(compiled.validate(states, prepared.validation))
    return {
        "overrides": list(sweep.overrides),
        "learning_rate": _rate(config),
        "factors": list(sweep.factors),
        "losses": losses.astype(float).round(5).tolist(),
        "device": jax.devices()[0].device_kind,
        "compile_s": round(compiled.compile_s, 1),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _rate(config: Config) -> float:
    """Return the rate of matrices, to which the factors of a sweep belong."""
    optimizer = config.optimizer
    is_muon = optimizer.name == "muon"
    return optimizer.muon_learning_rate if is_muon else optimizer.learning_rate


def main() -> None:
    """Run the sweeps that the JSON file lacks, and print the best rate of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=epath.Path, required=True)
    parser.add_argument("--part", choices=("transfer", "defaults"), default="transfer")
    parser.add_argument("--text", default="tinyshakespeare.txt")
    parser.add_argument("--steps", type=int, default=1200, help="of a transfer run")
    parser.add_argument("--only", default="", help="sweeps whose name contains this")
    parser.add_argument("--stop-after-s", type=float, default=float("inf"))
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    begin = time.monotonic()
    set_up(compose([]).runtime)
    transfer = options.part == "transfer"
    chosen = (
        transfer_sweeps(options.steps) if transfer else default_sweeps(options.text)
    )
    sweeps = [s for s in chosen if options.only in s.name and s.name not in results]
    lock = Lock()

    def prepare_and_compile(sweep: Sweep) -> Compiled:
        with lock:  # Hydra composes one config at a time.
            prepared = prepare(sweep)
        return compile_sweep(prepared)

    workers = 1 if jax.default_backend() == "cpu" else 6
    with ThreadPoolExecutor(workers) as pool:
        pending = [pool.submit(prepare_and_compile, s) for s in sweeps]
        for sweep, compiled in zip(sweeps, pending, strict=True):
            if time.monotonic() - begin > options.stop_after_s:
                compiled.cancel()
                continue
            results[sweep.name] = result = train(compiled.result())
            write_atomically(options.json, json.dumps(results, indent=1) + "\n")
            best = min(np.mean(result["losses"], axis=1))
            print(
                f"{sweep.name:32} rate {vertex(result) * result['learning_rate']:.5f} "
                f"(factor {vertex(result):.2f}) loss {best:.4f}, "
                f"{result['compile_s']} + {result['seconds']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
