"""Settle a config once: turn it into the program for a set of devices.

Training, evaluation, sampling and the plan all start here. Nothing that runs after
`make_program` reads `auto`, null or -1 from a config.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from data.batch import Batch
from data.config import DataConfig
from data.errors import Mistake
from model.catalog import parts_of
from model.choices import Position
from model.execution import Execution
from model.gpt import GPT, abstract_gpt, params_of
from model.params import param_infos
from train.config import Config, TrainConfig
from train.core.layout import StateLayout, batch_shards
from train.core.program import Program, sharded_state
from train.core.recipe import Recipe
from train.core.shards import PipelineSchedule
from train.errors import ConfigError, check_all
from train.hardware.collective_steps import collective_steps
from train.losses.catalog import make_loss
from train.optimizers.catalog import OPTIMIZERS
from train.own_parts import added_metrics
from train.resolve.added_parts import check_added_parts
from train.resolve.execution import ExecutionChoice
from train.resolve.mesh import Device, make_mesh
from train.resolve.mesh_sizes import (
    check_batch,
    check_pipeline,
    least_sizes,
    pipeline_of,
    with_dividing_rules,
)
from train.resolve.optimizer import make_optimizer
from train.resolve.sharding import param_specs
from train.runtime import compiler_options


@dataclass(frozen=True, kw_only=True)
class ConfiguredProgram(Program):
    """A program, and the config from which it was made.

    pipeline: how microbatches pass through the stages of a pipeline.
    """

    config: Config
    pipeline: PipelineSchedule

    def with_train_config(self, train: TrainConfig) -> "ConfiguredProgram":
        """Return this program with other microbatches, remat or offload settings."""
        config = replace(self.config, train=train)
        mesh = self.mesh
        choice = ExecutionChoice(config, mesh.devices.flat[0], mesh.shape)
        axis_steps = self.execution.placement.axis_steps
        execution = self.execution._replace(
            remat=train.remat,
            offload=train.offload,
            layer_unroll=choice.layer_unroll(),
            placement=choice.placement(mesh, axis_steps),
        )
        recipe = recipe_of(train)
        return replace(self, config=config, execution=execution, recipe=recipe)


def recipe_of(train: TrainConfig) -> Recipe:
    """Return what a step computes, from the section `train` of a config."""
    return Recipe(
        accumulation_steps=train.accumulation_steps,
        token_loss=make_loss(train),
        loss_chunk_tokens=train.loss_chunk_tokens,
        skip_sigma=train.skip_sigma,
        skip_window=train.skip_window,
        predict_ahead_weight=train.predict_ahead_weight,
        predict_ahead_later_weight=train.predict_ahead_later_weight,
        predict_ahead_later_step=train.predict_ahead_later_step,
        metrics=tuple((m.name, m.compute) for m in added_metrics(train)),
    )


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
) -> ConfiguredProgram:
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
    device = devices[0]
    data = config.data
    train = config.train
    sizes = least_sizes(config.mesh, len(devices))
    mesh = with_dividing_rules(config.mesh, sizes, config.model.embed_dim)
    config = replace(config, mesh=mesh)
    check_added_parts(config.model, train)
    parts = parts_of(config.model)
    model = abstract_gpt(config.model, parts)
    infos = param_infos(model)
    choice = ExecutionChoice(config, device, sizes)
    layout, execution = _lay_out(choice, devices, model, infos)
    recipe = recipe_of(train)
    optimizer = make_optimizer(
        config.optimizer,
        config.schedule.in_steps(data),
        schedule_steps or train.num_steps,
        parts=OPTIMIZERS,
        model=config.model,
        infos=infos,
        compute_dtype=execution.numerics.compute_dtype,
        mesh=layout.mesh,
        specs=layout.param_specs,
        seed=config.seed,
        platform=device.platform,
        rate_factor=config.schedule.batch_factor(
            data.batch_size * data.sequence_length
        ),
    )
    return ConfiguredProgram(
        config=config,
        pipeline=pipeline_of(config.mesh, train, sizes["pipeline"]),
        model=model,
        parts=parts,
        infos=infos,
        layout=layout,
        execution=execution,
        recipe=recipe,
        optimizer=optimizer,
        state=sharded_state(model, parts, layout, optimizer, recipe),
        batch=_abstract_batch(data, layout.batch_sharding),
        seed=config.seed,
        compiler_options=compiler_options(
            device,
            execution.numerics.compute_dtype,
            config.runtime,
            num_devices=len(devices),
            profiled=bool(config.profile.steps),
        ),
        num_tokens=num_tokens,
    )


def _lay_out(
    choice: ExecutionChoice, devices: Sequence[Device], model: GPT, infos: Any
) -> tuple[StateLayout, Execution]:
    """Return where arrays lie on some devices, and how the model runs there.

    Raises:
        ConfigError: with the mistakes of all checks.
    """
    config = choice.config
    rules = choice.rules
    sizes = choice.sizes
    pipeline = pipeline_of(config.mesh, config.train, sizes["pipeline"])
    mesh, execution, _, _, specs = check_all(
        lambda: make_mesh(config.mesh, devices),
        choice.execution,
        lambda: check_pipeline(config.model, config.mesh, config.train, sizes),
        lambda: check_batch(
            config.data.batch_size,
            config.train.accumulation_steps,
            batch_shards(rules, sizes).rows,
            pipeline.local_microbatches,
        ),
        lambda: param_specs(params_of(model), infos, sizes, config.mesh.params),
    )
    placement = choice.placement(mesh, collective_steps(mesh))
    layout = StateLayout(mesh, specs, rules, offload=config.optimizer.offload)
    return layout, execution._replace(placement=placement)


def _abstract_batch(data: DataConfig, sharding: NamedSharding) -> Batch:
    """Return a batch of `jax.ShapeDtypeStruct`. Its ids exist for masks only."""
    shape = data.batch_size, data.sequence_length
    x_BT = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return Batch(x_BT, x_BT, x_BT if data.document_mask else None, positions=x_BT)
