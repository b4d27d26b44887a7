"""Train a small model for a few steps, and measure its activations."""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from data.batch import Batch
from data.batches import Order
from data.sources import Sources
from model.choices import ComputeDtype, Dtype
from model.execution import CallContext
from model.gpt import bind
from model.mixer_catalog import sized_kinds
from model.taps import Taps
from train.config import MESH_AXES, Config, DcnConfig, Schedule, ScheduleConfig
from train.core.feed import place
from train.core.program import Program
from train.resolve.program import ConfiguredProgram

ROWS = 4
LENGTH = 64
SEEDS = 3
# A tenth of the run's learning rates: so small updates add up, whatever their sign.
_RATE_FACTOR = 0.1
# The sizes of a model that grow with its width, besides those of mixers and MLPs.
_INNER = ("mlp_dim", "expert_dim")


class _Recorder(Taps):
    """Records results of layers as they are, instead of their largest values."""

    def note(self, name: str, x: Float[Array, "..."]) -> None:
        self._largest[name] = x.astype(jnp.float32)


@dataclass(frozen=True)
class ModelFamily:
    """Models of several sizes, made from the config of a run.

    config: the config of the run, with its vocabulary size set (`settle`).
    """

    config: Config

    def resized(self, width: int, depth: int) -> Config:
        """Return the run's config with a model of another size, for one device.

        The dims of heads and the number of experts stay. All other widths grow with the
        model. Learning rates are constant and small, and products are in float32.
        """
        model = self.config.model
        data = self.config.data
        optimizer = self.config.optimizer
        keys = [key for kind in sized_kinds(model) for key in kind.width_keys]
        inner = {f"model.{key}": attrgetter(key)(model) for key in (*_INNER, *keys)}
        changes = {
            **{k: n and max(1, n * width // model.embed_dim) for k, n in inner.items()},
            **{f"mesh.{axis}": 1 for axis in MESH_AXES},
            "mesh.dcn": DcnConfig(),
            "model.embed_dim": width,
            "model.num_layers": depth,
            "model.dense_layers": min(model.dense_layers, depth - 1),
            "model.high_precision_layers": (),
            "model.compute_dtype": ComputeDtype.float32,
            "model.param_dtype": Dtype.float32,
            "data.batch_size": ROWS,
            "data.sequence_length": min(LENGTH, data.sequence_length),
            "data.batch_schedule": [],
            "data.sequence_schedule": [],
            "train.accumulation_steps": 1,
            "optimizer.learning_rate": _RATE_FACTOR * optimizer.learning_rate,
            "optimizer.muon_learning_rate": _RATE_FACTOR * optimizer.muon_learning_rate,
        }
        schedule = ScheduleConfig(name=Schedule.constant, warmup_steps=0)
        return replace(self.config, schedule=schedule).with_values(changes)


def measure(
    program: ConfiguredProgram, sources: Sources, steps: int
) -> dict[str, Float[np.ndarray, "2 L"]]:
    """Return root mean squares of a batch's activations after some updates, by name.

    The first row has those of the activations, and the second row those of their
    difference from the initial model's. They are over several seeds. Results of layers
    have a column for each layer; "features" and "logits" have one column.
    """
    config = program.config
    order = Order(sources, config.data, config.seed)
    *batches, probe = (place(order.read(s), program.batch) for s in range(steps + 1))
    run = jax.jit(lambda params: _run_model(program, params, probe))
    squares = []
    for seed in range(config.seed, config.seed + SEEDS):
        state = program.initial_state(seed)
        before = run(state.params)
        for batch in batches:
            state, _ = program.train_step(state, batch)
        squares.append(jax.tree.map(_mean_squares, run(state.params), before))
    return jax.tree.map(lambda *xs: np.sqrt(np.mean(xs, axis=0)), *squares)


def _mean_squares(
    after: Float[Array, "L B T _"], before: Float[Array, "L B T _"]
) -> Float[Array, "2 L"]:
    x = jnp.stack([after, after - before])
    return jnp.mean(jnp.square(x), axis=(2, 3, 4))


def _run_model(program: Program, params: Any, batch: Batch) -> dict[str, jax.Array]:
    """Return results of layers [L, B, T, D], features and logits [1, B, T, _]."""
    model = bind(program.model, params)
    taps = _Recorder()
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
