"""From a config to everything that `jit` needs, on a given set of devices.

Training, evaluation, sampling and the plan all start here, so that what is planned is
what runs.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from model.placement import Placement
from train.config import Config, TrainConfig
from train.errors import ConfigError, Mistake, check_all
from train.execution import choose_execution
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


class BatchShards(NamedTuple):
    """How many shards a batch has along its rows and along the positions of a row."""

    rows: int
    sequence: int


def batch_shards(rules: AxisRules, sizes: Mapping[str, int]) -> BatchShards:
    """Return how many shards a batch has on a mesh with these axis sizes."""
    rows, sequence = rules.spec("batch", "seq")
    return BatchShards(num_shards(sizes, rows), num_shards(sizes, sequence))


def _rows_are_smaller(config: Config, shards: BatchShards) -> bool:
    """Return whether a device looks up fewer embedding rows than the table has."""
    tokens = config.data.batch_size * config.data.sequence_length
    local_tokens = tokens // (config.train.accumulation_steps * math.prod(shards))
    return local_tokens < config.model.vocab_rows


def _reduces_in_layers(config: Config, pipeline: Pipeline) -> bool:
    """Return whether each step has one backward pass through each layer."""
    return config.train.accumulation_steps == 1 == pipeline.stages


@dataclass(frozen=True)
class Program:
    """A settled config on a mesh. `state` holds shapes, dtypes and shardings."""

    config: Config
    mesh: Mesh
    model: GPT  # abstract
    infos: Any
    optimizer: Optimizer
    execution: Execution
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
            self.model,
            self.optimizer,
            self.execution,
            train,
            seed,
            watched=watched,
            num_tokens=self.num_tokens,
        )
        return jax.jit(
            step,
            in_shardings=(self.shardings, self.batch_shardings),
            out_shardings=(self.shardings, self.replicated),
            donate_argnums=0,
            compiler_options=compiler_options(
                self.mesh.devices.flat[0],
                self.execution.numerics.compute_dtype,
                self.config.runtime.sparse_cores,
            ),
        )

    @functools.cached_property
    def eval_step(self):
        """Jitted: (params, batch) -> (nats, targets)."""
        step = make_eval_step(
            self.model, self.execution, self.config.train, self.num_tokens
        )
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

    @property
    def batch_shards(self) -> BatchShards:
        """How many shards the batch has along its rows and along positions."""
        return batch_shards(self.execution.placement.rules, self.mesh.shape)

    def with_train_config(self, train: TrainConfig) -> "Program":
        """Return the same program with other microbatches or recomputation."""
        config, placement = replace(self.config, train=train), self.execution.placement
        placement = replace(
            placement,
            exchange_embedding_rows=_rows_are_smaller(config, self.batch_shards),
            reduce_in_layers=_reduces_in_layers(config, self.pipeline),
        )
        execution = self.execution._replace(
            remat=train.remat, offload=train.offload, placement=placement
        )
        return replace(self, config=config, execution=execution)


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
    shards = batch_shards(rules, sizes)
    model = abstract_gpt(config.model)
    infos = param_infos(model)
    pipeline = pipeline_of(config, sizes["pipeline"])
    mesh, execution, _, _, specs = check_all(
        lambda: make_mesh(config.mesh, devices),
        lambda: choose_execution(config, devices[0], rules, sizes),
        lambda: check_pipeline(config, sizes),
        lambda: check_batch(
            data.batch_size, train.accumulation_steps, shards.rows, pipeline.own
        ),
        lambda: param_specs(params_of(model), infos, sizes, config.mesh.params),
    )
    placement = Placement(
        mesh=mesh,
        rules=rules,
        platform=devices[0].platform,
        axis_steps=collective_steps(mesh),
        reduce_in_layers=_reduces_in_layers(config, pipeline),
        exchange_embedding_rows=_rows_are_smaller(config, shards),
    )
    execution = execution._replace(placement=placement)
    optimizer = make_optimizer(
        config.optimizer,
        config.schedule,
        schedule_steps or train.num_steps,
        infos,
        execution.numerics.compute_dtype,
        mesh,
        specs,
        config.seed,
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
        execution=execution,
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
