"""Turn a config into everything that `jit` needs, on a given set of devices.

Training, evaluation, sampling and the plan all start here, so that the plan describes
the program that runs.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.batch import Batch
from data.config import DataConfig
from model.catalog import MODEL_PARTS
from model.choices import Position
from model.count import num_active_params, num_params
from model.execution import Execution
from model.gpt import GPT, abstract_gpt, params_of
from model.params import param_infos
from train.catalog import OPTIMIZERS
from train.config import Config, TrainConfig
from train.core.eval_step import make_eval_step
from train.core.execution import (
    BatchShards,
    batch_shards,
    choose_execution,
    choose_layer_unroll,
    choose_placement,
    recipe_of,
)
from train.core.mesh import Device, make_mesh
from train.core.mesh_sizes import (
    PipelineSchedule,
    check_batch,
    check_pipeline,
    least_sizes,
    pipeline_of,
)
from train.core.model_flops import attention_flops, weight_flops
from train.core.optimizer.make import make_optimizer
from train.core.optimizer.update import Optimizer
from train.core.recipe import Recipe
from train.core.runtime import compiler_options
from train.core.sharding import axis_rules, moments_of, param_specs, state_shardings
from train.core.state import TrainState, abstract_state, initial_state
from train.core.step import make_train_step
from train.errors import ConfigError, Mistake, check_all
from train.hardware.collective_steps import collective_steps


@dataclass(frozen=True)
class Program:
    """A config, and everything that `jit` needs to run it on a mesh.

    model: the abstract model.
    infos: tree of `ParamInfo`, shaped like the parameters.
    state, batch: trees of `jax.ShapeDtypeStruct` with shardings.
    num_tokens: the number of ids that the tokenizer has. None means that it has all ids
        of the vocabulary.
    """

    config: Config
    mesh: Mesh
    model: GPT
    infos: Any
    optimizer: Optimizer
    execution: Execution
    state: TrainState
    batch: Batch
    num_tokens: int | None = None

    @property
    def shardings(self) -> TrainState:
        """The sharding of each leaf of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    @functools.cached_property
    def init(self):
        """Jitted: () -> the state of step 0, created with its shardings."""
        init_fn = functools.partial(self.initial_state, self.config.seed)
        return jax.jit(init_fn, out_shardings=self.shardings)

    @property
    def recipe(self) -> Recipe:
        """What a training step computes, besides its model and its optimizer."""
        return recipe_of(self.config.train)

    def initial_state(self, seed: int) -> TrainState:
        """Return the state of step 0 of a run with this seed. Call it under `jit`."""
        config = self.config
        return initial_state(
            config.model, MODEL_PARTS, self.optimizer, self.recipe, seed
        )

    @functools.cached_property
    def train_step(self):
        """Jitted: (state, batch) -> (state, metrics); the old state is donated."""
        return self._jit_step(watched=False)

    @functools.cached_property
    def watched_step(self):
        """Jitted: a train step that adds layer statistics (train/core/numerics.py)."""
        return self._jit_step(watched=True)

    def _jit_step(self, watched: bool):
        step = make_train_step(
            self.model,
            self.optimizer,
            self.execution,
            self.recipe,
            self.config.seed,
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
                profiled=bool(self.config.profile.steps),
            ),
        )

    @functools.cached_property
    def eval_step(self):
        """Jitted: (params, batch) -> (nats, targets)."""
        recipe = self.recipe
        step = make_eval_step(self.model, self.execution, recipe, self.num_tokens)
        return jax.jit(
            step,
            in_shardings=(self.shardings.params, self.batch_shardings),
            out_shardings=self.replicated,
        )

    @property
    def host_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The leaves of the state that are in host memory, by name."""
        offload = self.config.optimizer.offload
        return dict(moments_of(self.state)) if offload else {}

    @property
    def batch_shardings(self) -> Batch:
        """The sharding of each field of a batch."""
        return jax.tree.map(lambda field: field.sharding, self.batch)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens in a global batch."""
        return self.config.data.batch_size * self.config.data.sequence_length

    @property
    def pipeline(self) -> PipelineSchedule:
        """How microbatches pass through the stages of a pipeline."""
        return pipeline_of(self.config, self.mesh.shape["pipeline"])

    @functools.cached_property
    def num_params(self) -> int:
        """The number of parameters, excluding the rows that only pad the vocabulary."""
        return num_params(self.model)

    @functools.cached_property
    def num_active_params(self) -> int:
        """The number of parameters that one token uses."""
        return num_active_params(self.model)

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of a step (convention: train/core/model_flops.py)."""
        model = self.config.model
        length = self.config.data.sequence_length
        per_token = weight_flops(model, self.state.params, self.infos)
        return (per_token + attention_flops(model, length)) * self.tokens_per_step

    @property
    def batch_shards(self) -> BatchShards:
        """How many shards the batch has along its rows and along positions."""
        return batch_shards(self.execution.placement.rules, self.mesh.shape)

    def with_train_config(self, train: TrainConfig) -> "Program":
        """Return this program with other microbatches, remat or offload settings."""
        config = replace(self.config, train=train)
        axis_steps = self.execution.placement.axis_steps
        platform = self.mesh.devices.flat[0].platform
        sizes = self.mesh.shape
        execution = self.execution._replace(
            remat=train.remat,
            offload=train.offload,
            layer_unroll=choose_layer_unroll(config, platform, sizes),
            placement=choose_placement(config, self.mesh, axis_steps),
        )
        return replace(self, config=config, execution=execution)


def settle(config: Config, vocab_size: int, num_tokens: int = 0) -> Config:
    """Fill in the model's vocabulary size and number of positions, if they are unset.

    Args:
        config: the composed config.
        vocab_size: the size of the tokenizer's vocabulary, padded to a multiple of 128.
        num_tokens: the number of ids that the tokenizer has. 0 skips the size check.

    Raises:
        ConfigError: if the model's vocabulary is smaller than the tokenizer's.
    """
    model = config.model
    if model.vocab_size is None:
        model = replace(model, vocab_size=vocab_size)
    elif model.vocab_size < num_tokens:
        rule = f"must be at least the {num_tokens} tokens of data.tokenizer="
        rule += f"{config.data.tokenizer}; raise it, or set it to null for as many"
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
    """Return the program of a config on a set of devices.

    Args:
        config: the config, with the vocabulary size set (`settle`).
        devices: the devices of the mesh. None means all devices of this run.
        schedule_steps: the length of the schedule. None means train.num_steps. An
            extended run still has the schedule length of its first start.
        num_tokens: the number of ids that the tokenizer has. Larger ids get probability
            zero. None means that the tokenizer has all ids of the vocabulary.

    Raises:
        ConfigError: if mesh, batch, model and devices do not fit; lists all mistakes.
    """
    devices = jax.devices() if devices is None else devices
    sizes = least_sizes(config.mesh, len(devices))
    data = config.data
    train = config.train
    shards = batch_shards(axis_rules(config.mesh), sizes)
    model = abstract_gpt(config.model, MODEL_PARTS)
    infos = param_infos(model)
    local_microbatches = pipeline_of(config, sizes["pipeline"]).local_microbatches
    mesh, execution, _, _, specs = check_all(
        lambda: make_mesh(config.mesh, devices),
        lambda: choose_execution(config, devices[0], sizes),
        lambda: check_pipeline(config, sizes),
        lambda: check_batch(
            data.batch_size, train.accumulation_steps, shards.rows, local_microbatches
        ),
        lambda: param_specs(params_of(model), infos, sizes, config.mesh.params),
    )
    placement = choose_placement(config, mesh, collective_steps(mesh))
    execution = execution._replace(placement=placement)
    optimizer = make_optimizer(
        config.optimizer,
        config.schedule.in_steps(config.data),
        schedule_steps or train.num_steps,
        parts=OPTIMIZERS,
        model=config.model,
        infos=infos,
        compute_dtype=execution.numerics.compute_dtype,
        mesh=mesh,
        specs=specs,
        seed=config.seed,
        platform=devices[0].platform,
        rate_factor=config.schedule.batch_factor(
            data.batch_size * data.sequence_length
        ),
    )
    state = abstract_state(config.model, MODEL_PARTS, optimizer, recipe_of(train))
    table = config.mesh.params
    offload = config.optimizer.offload
    shardings = state_shardings(state, infos, mesh, table, offload)
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
        batch=_abstract_batch(
            data, NamedSharding(mesh, placement.rules.spec("batch", "seq"))
        ),
        num_tokens=num_tokens,
    )


def _abstract_batch(data: DataConfig, sharding: NamedSharding) -> Batch:
    """Return a batch of `jax.ShapeDtypeStruct`. Its ids exist for masks only."""
    shape = data.batch_size, data.sequence_length
    x_BT = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return Batch(x_BT, x_BT, x_BT if data.document_mask else None, positions=x_BT)
