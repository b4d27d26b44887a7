"""Train a small model for a few steps, and measure its activations."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from data.batches import Batch, Order
from data.sources import Sources
from model.choices import ComputeDtype, Dtype
from model.execution import CallContext
from model.gpt import bind
from model.taps import Taps
from train.config import Config, Schedule, ScheduleConfig
from train.feed import place
from train.program import Program, make_program
from train.state import initial_state

ROWS, LENGTH = 4, 64
SEEDS = 3
# A tenth of the run's learning rates: so small updates add up, whatever their sign.
_RATE_FACTOR = 0.1
# Inner widths, which grow with the width of the residual stream.
_INNER = (
    *("mlp_dim", "expert_dim", "query_rank", "kv_rank"),
    *("delta_key_heads", "delta_value_heads"),
)


class Activations(NamedTuple):
    """Root mean squares of an activation after training.

    size: of its values.
    change: of their difference from those of the initial model.
    """

    size: float
    change: float


class _Recorder(Taps):
    """Records results of layers as they are, instead of their largest values."""

    def note(self, name: str, x: Float[Array, "..."]) -> None:
        self._largest[name] = x.astype(jnp.float32)


def resize(config: Config, width: int, depth: int) -> Config:
    """Return a run's config with a model of another size, for one device.

    The dims of heads and the number of experts stay. All other widths grow with the
    model. Learning rates are constant and small, and products are in float32.
    """
    model, data, optimizer = config.model, config.data, config.optimizer

    def scale(size: int) -> int:
        return max(1, round(size * width / model.embed_dim))

    inner = {key: getattr(model, key) for key in _INNER}
    inner = {key: scale(size) for key, size in inner.items() if size is not None}
    num_heads, ratio = model.num_heads, model.num_heads // model.kv_heads
    if not model.has_latent_attention:
        num_heads = width // model.head_size
        inner["head_dim"] = model.head_size
        inner["num_kv_heads"] = max(1, num_heads // ratio)
    else:
        num_heads = scale(num_heads)
    length = min(LENGTH, data.sequence_length)
    return replace(
        config,
        model=replace(
            model,
            embed_dim=width,
            num_layers=depth,
            num_heads=num_heads,
            dense_layers=min(model.dense_layers, depth - 1),
            high_precision_layers=(),
            compute_dtype=ComputeDtype.float32,
            param_dtype=Dtype.float32,
            **inner,
        ),
        data=replace(
            data,
            batch_size=ROWS,
            sequence_length=length,
            batch_schedule=[],
            sequence_schedule=[],
        ),
        optimizer=replace(
            optimizer,
            learning_rate=_RATE_FACTOR * optimizer.learning_rate,
            muon_learning_rate=_RATE_FACTOR * optimizer.muon_learning_rate,
        ),
        schedule=ScheduleConfig(name=Schedule.constant, warmup_steps=0),
        train=replace(config.train, accumulation_steps=1),
    )


def measure(
    config: Config, sources: Sources, steps: int
) -> dict[tuple[int, str], Activations]:
    """Return the activations of a batch after some updates, by layer and name.

    They are root mean squares over several seeds. The layer of features and logits is
    the number of layers.
    """
    program = make_program(config, jax.devices()[:1])
    order, depth = Order(sources, config.data, config.seed), config.model.num_layers
    *batches, probe = (place(order.read(s), program.batch) for s in range(steps + 1))
    run = jax.jit(lambda params: _run_model(program, params, probe))
    squares = dict[tuple[int, str], list[list[float]]]()
    for seed in range(SEEDS):
        optimizer, train = program.optimizer, config.train
        state = initial_state(config.model, optimizer, train, config.seed + seed)
        before = run(state.params)
        for batch in batches:
            state, _ = program.train_step(state, batch)
        for name, after in run(state.params).items():
            first = 0 if len(after) == depth else depth
            for i, pair in enumerate(zip(after, after - before[name], strict=True)):
                means = [float(jnp.mean(jnp.square(x))) for x in pair]
                squares.setdefault((first + i, name), []).append(means)
    return {
        key: Activations(*np.sqrt(np.mean(values, axis=0)).tolist())
        for key, values in squares.items()
    }


def _run_model(program: Program, params: Any, batch: Batch) -> dict[str, jax.Array]:
    """Return results of layers [L, B, T, D], features and logits [1, B, T, _]."""
    model, taps = bind(program.model, params), _Recorder()
    features_BTD, *_ = model.features(
        batch.inputs,
        batch.positions,
        batch.segment_ids,
        program.execution,
        call=CallContext(taps=taps),
    )
    logits_BTV = model.logits(features_BTD, program.execution)
    last = {"features": features_BTD[None], "logits": logits_BTV[None]}
    return taps.all_figures().largest | last
