"""From a config to everything that `jit` needs, on a given set of devices.

Training, evaluation, sampling and the plan all start here, so that what is planned is
what runs.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.batches import Batch
from data.config import DataConfig
from model.axes import AxisRules
from model.choices import Position
from model.execution import Execution
from model.gpt import (
    GPT,
    abstract_gpt,
    num_active_params,
    num_params,
    params_of,
)
from model.params import param_infos
from train.config import Config, TrainConfig
from train.errors import ConfigError, Mistake, check_all
from train.execution import execution
from train.hardware.collective_steps import collective_steps
from train.mesh import Device, make_mesh
from train.mesh_sizes import (
    Pipeline,
    check_batch,
    check_pipeline,
    least_sizes,
    num_shards,
    pipeline_of,
)
from train.model_flops import attention_flops, weight_flops
from train.optimizer.update import Optimizer, make_optimizer
from train.runtime import compiler_options
from train.sharding import (
    axis_rules,
    batch_sharding,
    moments_of,
    param_specs,
    state_shardings,
)
from train.state import TrainState, abstract_state, initial_state
from train.step import make_eval_step, make_train_step


@dataclass(frozen=True)
class Program:
    """A settled config on a mesh. `state` holds shapes, dtypes and shardings."""

    config: Config
    mesh: Mesh
    model: GPT  # abstract
    infos: Any
    optimizer: Optimizer
    how: Execution
    state: TrainState  # of jax.ShapeDtypeStruct
    batch: Batch  # of jax.ShapeDtypeStruct
    # The tokenizer's ids, as `loss_sum` takes them; None: the whole vocabulary.
    num_tokens: int | None = None

    @property
    def shardings(self) -> TrainState:
        """Where each leaf of the state lies."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    @functools.cached_property
    def init(self):
        """Jitted: () -> the state of step 0, born sharded."""
        config = self.config
        start = functools.partial(
            initial_state, config.model, self.optimizer, config.train, config.seed
        )
        return jax.jit(start, out_shardings=self.shardings)

    @functools.cached_property
    def train_step(self):
        """Jitted: (state, batch) -> (state, metrics); the old state is donated."""
        return self._jit_step(watched=False)

    @functools.cached_property
    def watched_step(self):
        """Jitted: a train step whose metrics have figures of its layers too."""
        return self._jit_step(watched=True)

    def _jit_step(self, watched: bool):
        train, seed = self.config.train, self.config.seed
        step = make_train_step(
            self.model, self.optimizer, self.how, train, seed, watched, self.num_tokens
        )
        return jax.jit(
            step,
            in_shardings=(self.shardings, self.batch_shardings),
            out_shardings=(self.shardings, self.replicated),
            donate_argnums=0,
            compiler_options=compiler_options(
                self.mesh.devices.flat[0],
                self.how.compute_dtype,
                self.config.runtime.sparse_cores,
            ),
        )

    @functools.cached_property
    def eval_step(self):
        """Jitted: (params, batch) -> (nats, targets)."""
        step = make_eval_step(self.model, self.how, self.config.train, self.num_tokens)
        return jax.jit(
            step,
            in_shardings=(self.shardings.params, self.batch_shardings),
            out_shardings=self.replicated,
        )

    @property
    def host_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What of the state lies in host memory, by name."""
        offload = self.config.optimizer.offload
        return dict(moments_of(self.state)) if offload else {}

    @property
    def batch_shardings(self) -> Batch:
        """Where each field of a batch lies."""
        return jax.tree.map(lambda field: field.sharding, self.batch)

    @property
    def replicated(self) -> NamedSharding:
        """On every device, whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.config.data.batch_size * self.config.data.sequence_length

    @property
    def pipeline(self) -> Pipeline:
        """How microbatches pass through stages of layers."""
        return pipeline_of(self.config, self.mesh.shape["pipeline"])

    @functools.cached_property
    def num_params(self) -> int:
        """The number of parameters, without those that only pad the vocabulary."""
        return num_params(self.config.model)

    @functools.cached_property
    def num_active_params(self) -> int:
        """The number of those that a token meets."""
        return num_active_params(self.config.model)

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of a step (convention: train/model_flops.py)."""
        model, length = self.config.model, self.config.data.sequence_length
        per_token = weight_flops(model, self.state.params, self.infos)
        return (per_token + attention_flops(model, length)) * self.tokens_per_step

    def trained(self, train: TrainConfig) -> "Program":
        """Return the same program with other microbatches or recomputation."""
        config, rules = replace(self.config, train=train), self.how.rules
        parts = math.prod(shards_of(rules, self.mesh.shape))
        rules = replace(rules, rows_travel=rows_travel(config, parts))
        once = train.accumulation_steps == 1 == self.pipeline.stages
        how = self.how._replace(
            remat=train.remat, offload=train.offload, rules=rules, reduces_copies=once
        )
        return replace(self, config=config, how=how)


def settle(config: Config, vocab_size: int, num_tokens: int = 0) -> Config:
    """Fill in what the model takes from the data: vocabulary and longest row.

    Args:
        config: as composed.
        vocab_size: the tokenizer's, padded to a multiple of 128.
        num_tokens: the tokenizer's own, which the model's vocabulary must hold; 0
            leaves that unchecked.

    Raises:
        ConfigError: if the model's vocabulary is smaller than the tokenizer's.
    """
    model = config.model
    if model.vocab_size is None:
        model = replace(model, vocab_size=vocab_size)
    elif model.vocab_size < num_tokens:
        rule = (
            f"must hold the {num_tokens} tokens of data.tokenizer="
            f"{config.data.tokenizer}; raise it, or null for just as many"
        )
        raise ConfigError([Mistake("model.vocab_size", model.vocab_size, rule)])
    if model.position is Position.learned and model.max_sequence_length is None:
        model = replace(model, max_sequence_length=config.data.sequence_length)
    return replace(config, model=model)


def shards_of(rules: AxisRules, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return into how many parts the rows of a batch are cut, and each row."""
    rows, sequence = rules.spec("batch", "seq")
    return num_shards(sizes, rows), num_shards(sizes, sequence)


def rows_travel(config: Config, parts: int) -> bool:
    """Tell whether a device looks up fewer rows of the embedding than there are.

    Then devices that share the table exchange rows, else they gather it.
    """
    batch = config.data.batch_size * config.data.sequence_length
    vocab_rows = config.model.vocab_rows
    return batch // (config.train.accumulation_steps * parts) < vocab_rows


def make_program(
    config: Config,
    devices: Sequence[Device] | None = None,
    schedule_steps: int | None = None,
    num_tokens: int | None = None,
) -> Program:
    """Lay a settled config out on devices.

    Args:
        config: settled.
        devices: default: all there are.
        schedule_steps: the schedule's length, if not train.num_steps: a run that goes
            on beyond its first end keeps its schedule, at the last value.
        num_tokens: the number of ids that the tokenizer has. Larger ids have no
            probability. With None, all ids of the model's vocabulary have one.

    Raises:
        ConfigError: if it does not fit on them, with all that does not.
    """
    devices = jax.devices() if devices is None else devices
    sizes = least_sizes(config.mesh, len(devices))
    rules = axis_rules(config.mesh)
    data, train = config.data, config.train
    shards, sharing = shards_of(rules, sizes)
    rules = replace(rules, rows_travel=rows_travel(config, shards * sharing))
    model = abstract_gpt(config.model)
    infos = param_infos(model)
    pipeline = pipeline_of(config, sizes["pipeline"])
    mesh, how, _, _, specs = check_all(
        lambda: make_mesh(config.mesh, devices),
        lambda: execution(config, devices[0], rules, sizes),
        lambda: check_pipeline(config, sizes),
        lambda: check_batch(
            data.batch_size, train.accumulation_steps, shards, pipeline.own
        ),
        lambda: param_specs(params_of(model), infos, sizes, config.mesh.params),
    )
    how = how._replace(
        steps=collective_steps(mesh),
        reduces_copies=train.accumulation_steps == 1 == pipeline.stages,
        pipeline_microbatches=pipeline.microbatches,
        pipeline_repeats=pipeline.repeats,
    )
    optimizer = make_optimizer(
        config.optimizer,
        config.schedule,
        schedule_steps or train.num_steps,
        infos,
        compute_dtype=how.compute_dtype,
        mesh=mesh,
        specs=specs,
        seed=config.seed,
        platform=devices[0].platform,
    )
    state = abstract_state(config.model, optimizer, train)
    offload = config.optimizer.offload
    shardings = state_shardings(state, infos, mesh, config.mesh.params, offload)
    return Program(
        config=config,
        mesh=mesh,
        model=model,
        infos=infos,
        optimizer=optimizer,
        how=how,
        state=jax.tree.map(
            lambda leaf, sharding: leaf.update(sharding=sharding), state, shardings
        ),
        batch=_abstract_batch(config.data, batch_sharding(mesh, rules)),
        num_tokens=num_tokens,
    )


def _abstract_batch(data: DataConfig, sharding: NamedSharding) -> Batch:
    """Return the shapes, dtypes and sharding of a global batch."""
    shape = data.batch_size, data.sequence_length
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    segment_ids = rows if data.document_mask else None
    return Batch(rows, rows, segment_ids=segment_ids, positions=rows)
