"""Rebuild a run's program and weights, for the commands that use a trained model."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from data.catalog import text_store
from data.sources import Sources, open_sources
from model.choices import Attention, ComputeDtype
from model.config import ModelConfig
from train.config import Config, MeshConfig, RunConfig, RuntimeConfig, Step
from train.errors import ConfigError
from train.identity import run_dir
from train.resolve.mesh import Device
from train.resolve.program import ConfiguredProgram, make_program
from train.run.folder import run_folder
from train.run.restore import SavedSteps
from train.run.starts import check_data, read_run, recorded_run_id
from train.runtime import set_up

log = logging.getLogger(__name__)


def load_run(
    run: RunConfig,
    runtime: RuntimeConfig,
    step: Step | None = None,
    batch_size: int | None = None,
    schema: type[Config] = Config,
) -> tuple[ConfiguredProgram, Sources, int, Any]:
    """Build a run's program on this machine and restore its weights.

    Args:
        run: the name or the directory of the run.
        runtime: the settings of this machine.
        step: the step of the checkpoint; `best` is the one with the lowest validation
            loss, and None the newest.
        batch_size: the number of rows of a batch, in a single microbatch. None: the
            run's batch size and number of microbatches.
        schema: the dataclass of the run's config, with the keys of all its parts.

    Returns:
        The program, the data, the step, and the sharded parameters. These are averaged
        weights if the run averages its weights.

    Raises:
        ConfigError: if there is no such run.
        DataError: if the data is not the run's, or the checkpoint cannot be read.
    """
    directory = run_dir(Config(run=run)) if run.name or run.dir else None
    config = read_run(directory, schema=schema)
    data = replace(config.data, batch_size=batch_size or config.data.batch_size)
    microbatches = 1 if batch_size else config.train.accumulation_steps
    train = replace(config.train, accumulation_steps=1)
    config = replace(config, runtime=runtime, data=data, train=train)
    set_up(config.runtime)
    sources = open_sources(config.data, text_store)
    path = run_folder(directory or "")
    check_data(path, sources)
    num_tokens = sources.encoding.n_vocab
    program = with_microbatches(make_program_here(config, num_tokens), microbatches)
    saved = SavedSteps(path / "checkpoints", run_id=recorded_run_id(path))
    saved_step = saved.best() if step == "best" else step
    step, params = saved.restore_params(program.state, saved_step)
    return program, sources, step, params


def with_microbatches(program: ConfiguredProgram, limit: int) -> ConfiguredProgram:
    """Return a program that splits its batch into at most `limit` microbatches.

    Each device needs rows of every microbatch, so this mesh may require fewer.
    """
    local_rows = program.config.data.batch_size // program.batch_shards.rows
    count = math.gcd(local_rows, limit)
    train = program.config.train
    return program.with_train_config(replace(train, accumulation_steps=count))


def make_program_here(
    config: Config, num_tokens: int | None = None
) -> ConfiguredProgram:
    """Make a run's program for the devices of this machine.

    The program uses the run's mesh if it fits these devices and has no pipeline, which
    supports only training. Otherwise the program shards parameters over the largest
    number of devices that divides the batch size and fits the model. A kernel or a
    dtype that these devices do not support is replaced, with a warning.

    Raises:
        ConfigError: if the program fits no mesh of these devices.
    """
    try:
        return _make_on_fitting_mesh(
            config.mesh,
            config.data.batch_size,
            lambda mesh, devices: make_program(
                replace(config, mesh=mesh), devices, num_tokens=num_tokens
            ),
        )
    except ConfigError as error:
        refused_keys = {mistake.key for mistake in error.mistakes}
        if not (replacements := _replacements(config.model, refused_keys)):
            raise
    for key, value in replacements.items():
        message = "model.%s=%s is not possible on these devices; using %s instead"
        log.warning(message, key, getattr(config.model, key), value)
    config = replace(config, model=replace(config.model, **replacements))
    return make_program_here(config, num_tokens)


def _replacements(model: ModelConfig, refused_keys: set[str]) -> dict[str, Any]:
    """Return values for refused keys: auto, or the kernel xla, which runs anywhere."""
    is_explicit = model.attention is not Attention.auto
    replacements = {
        "attention": Attention.auto if is_explicit else Attention.xla,
        "compute_dtype": ComputeDtype.auto,
    }
    return {
        key: value
        for key, value in replacements.items()
        if f"model.{key}" in refused_keys and getattr(model, key) not in (value, "xla")
    }


def _make_on_fitting_mesh(
    run_mesh: MeshConfig,
    batch_size: int,
    make: Callable[[MeshConfig, Sequence[Device]], ConfiguredProgram],
) -> ConfiguredProgram:
    """Return the program on the run's mesh, or on a mesh that fits these devices.

    `make` makes the program on a mesh of some devices.
    """
    devices = jax.devices()
    refusal = ConfigError([])
    try:
        if run_mesh.pipeline == 1:
            return make(run_mesh, devices)
    except ConfigError as error:
        refusal = error
    params = run_mesh.params
    activations = run_mesh.activations
    mesh = MeshConfig(fsdp=-1, params=params, activations=activations)
    for count in range(len(devices), 0, -1):
        try:
            if batch_size % count == 0:
                program = make(mesh, devices[:count])
                log.info("the run's mesh does not fit; using fsdp %d", count)
                return program
        except ConfigError as error:
            refusal = error
    raise refusal
