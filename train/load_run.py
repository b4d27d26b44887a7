"""Rebuild the model of a run from its checkpoints, for commands on a run."""

import logging
import math
from dataclasses import replace
from typing import Any

import jax

from data.sources import Sources, open_sources
from model.choices import Attention, ComputeDtype
from model.config import ModelConfig
from train.config import Config, MeshConfig, RunConfig, RuntimeConfig, Step
from train.errors import ConfigError
from train.identity import run_dir
from train.program import Program, make_program
from train.run.folder import run_folder
from train.run.restore import SavedSteps
from train.run.starts import check_data, known_run_id, read_run
from train.runtime import set_up

log = logging.getLogger(__name__)


def load_run(
    run: RunConfig,
    runtime: RuntimeConfig,
    step: Step | None = None,
    batch_size: int | None = None,
) -> tuple[Program, Sources, int, Any]:
    """Build a run's program on this machine and restore its weights.

    Args:
        run: names the run.
        runtime: this machine.
        step: the step of the checkpoint; `best` has the lowest validation loss; None is
            the newest.
        batch_size: the batch size. By default it is that of the run, in its
            microbatches.

    Returns:
        The program, the data, the step, and the sharded parameters. If the run keeps an
        average of its weights, these are the average.

    Raises:
        ConfigError: if there is no such run.
        DataError: if the text is not the run's, or the checkpoint cannot be read.
    """
    directory = run_dir(Config(run=run)) if run.name or run.dir else None
    config = read_run(directory)
    data = replace(config.data, batch_size=batch_size or config.data.batch_size)
    microbatches = 1 if batch_size else config.train.accumulation_steps
    train = replace(config.train, accumulation_steps=1)
    config = replace(config, runtime=runtime, data=data, train=train)
    set_up(config.runtime)
    sources = open_sources(config.data)
    path = run_folder(directory or "")
    check_data(path, sources)
    num_tokens = sources.encoding.n_vocab
    program = in_microbatches(make_program_here(config, num_tokens), microbatches)
    saved = SavedSteps(path / "checkpoints", run_id=known_run_id(path))
    number = saved.best() if step == "best" else step
    step, params = saved.restore_params(program.state, number)
    return program, sources, step, params


def in_microbatches(program: Program, wanted: int) -> Program:
    """Split a program's batch into up to `wanted` microbatches.

    Each device needs rows of each of them, so on another mesh there may be fewer.
    """
    local_rows = program.config.data.batch_size // program.batch_shards.rows
    parts, train = math.gcd(local_rows, wanted), program.config.train
    return program.with_train_config(replace(train, accumulation_steps=parts))


def make_program_here(config: Config, num_tokens: int | None = None) -> Program:
    """Make a run's program for the devices of this machine.

    It uses the mesh of the run if that fits. Otherwise, or if that is a pipeline, which
    can only train, parameters are sharded over as many devices as divide the batch. A
    kernel or a dtype that these devices lack is replaced, with a warning.

    Raises:
        ConfigError: if it fits on no number of devices.
    """
    try:
        return _on_a_mesh(config, num_tokens)
    except ConfigError as error:
        refused = {mistake.key for mistake in error.mistakes}
        if not (replacements := _replacements(config.model, refused)):
            raise
    for key, value in replacements.items():
        message = "model.%s=%s is not possible on these devices; using %s instead"
        log.warning(message, key, getattr(config.model, key), value)
    config = replace(config, model=replace(config.model, **replacements))
    return make_program_here(config, num_tokens)


def _replacements(model: ModelConfig, refused: set[str]) -> dict[str, Any]:
    """Return other values for refused ones: auto, or the kernel that runs anywhere."""
    is_named = model.attention is not Attention.auto
    replacements = {
        "attention": Attention.auto if is_named else Attention.xla,
        "compute_dtype": ComputeDtype.auto,
    }
    return {
        key: value
        for key, value in replacements.items()
        if f"model.{key}" in refused and getattr(model, key) not in (value, "xla")
    }


def _on_a_mesh(config: Config, num_tokens: int | None) -> Program:
    """Return the program on the run's mesh, or on one that fits these devices."""
    devices, batch_size = jax.devices(), config.data.batch_size
    refusal = ConfigError([])
    try:
        if config.mesh.pipeline == 1:
            return make_program(config, num_tokens=num_tokens)
    except ConfigError as error:
        refusal = error
    params, activations = config.mesh.params, config.mesh.activations
    mesh = MeshConfig(fsdp=-1, params=params, activations=activations)
    sharded = replace(config, mesh=mesh)
    for count in range(len(devices), 0, -1):
        try:
            if batch_size % count == 0:
                program = make_program(sharded, devices[:count], num_tokens=num_tokens)
                log.info("the run's mesh does not fit; using fsdp %d", count)
                return program
        except ConfigError as error:
            refusal = error
    raise refusal
