"""Start from the newest checkpoint of another run, which may have another mesh."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from data.errors import Mistake
from model.config import ModelConfig
from model.params import ParamInfo, is_info
from train.config import Config, OptimizerConfig
from train.core.state import TrainState
from train.errors import ConfigError, as_typed
from train.identity import config_differences, is_covered
from train.own_parts import sections_like
from train.resolve.program import ConfiguredProgram, make_program
from train.run.digests import SEAL
from train.run.folder import run_folder
from train.run.restore import SavedSteps
from train.run.starts import read_run, recorded_run_id

# Model keys that may differ between the runs: execution and initialisation.
_FREE_KEYS = (
    *("model.name", "model.vocab_size", "model.init", "model.embedding_std"),
    *("model.param_dtype", "model.compute_dtype", "model.attention", "model.dropout"),
    *("model.layer_unroll", "model.router_aux_weight", "model.router_z_weight"),
    "model.high_precision_layers",
)


def is_run(path: str) -> bool:
    """Return whether a folder is the directory of a run."""
    return (run_folder(path, "init_from") / "config.yaml").exists()


def check_run(path: str, program: ConfiguredProgram) -> dict[str, str]:
    """Check another run's model; return values that all processes must agree on.

    Raises:
        ConfigError: if the models differ, with every difference, or if there is no
            checkpoint.
    """
    other_config = read_run(path, schema=sections_like(Config, program.config))
    own_model = program.config.model
    if mistakes := [*_model_mistakes(path, other_config.model, own_model)]:
        raise ConfigError(mistakes)
    _program_of(other_config.model, other_config.optimizer, program)
    (_, seal) = sealed_files(path)
    content = (run_folder(path) / seal).read_bytes()
    return {"weights to start from": f"{seal} {hashlib.sha256(content).hexdigest()}"}


def read_run_weights(path: str, program: ConfiguredProgram) -> TrainState:
    """Return the state of step 0 with a run's weights, averaged if it has an average.

    Raises:
        DataError: if the checkpoint differs from its recorded hashes.
    """
    other_config = read_run(path, schema=sections_like(Config, program.config))
    state = program.init()
    other_program = _program_of(other_config.model, other_config.optimizer, program)
    folder = run_folder(path)
    saved = SavedSteps(folder / "checkpoints", run_id=recorded_run_id(folder))
    _, params = saved.restore_params(other_program.state, _newest_sealed_step(path))
    num_rows = other_config.model.vocab_size or 0

    def replace_rows(info: ParamInfo, ours: jax.Array, theirs: jax.Array) -> jax.Array:
        theirs = theirs.astype(ours.dtype)
        if "vocab" not in info.axes:
            return theirs
        dim = info.axes.index("vocab")
        shared_rows = jax.lax.slice_in_dim(theirs, 0, num_rows, axis=dim)
        return jax.lax.dynamic_update_slice_in_dim(ours, shared_rows, 0, dim)

    @partial(jax.jit, out_shardings=program.shardings.params, donate_argnums=0)
    def replace_params(ours: Any, theirs: Any) -> Any:
        return jax.tree.map(replace_rows, program.infos, ours, theirs, is_leaf=is_info)

    return state._replace(params=replace_params(state.params, params))


def sealed_files(path: str) -> list[str]:
    """Return the names of a run's config file and its newest checkpoint's hash file."""
    return ["config.yaml", f"checkpoints/{_newest_sealed_step(path)}/{SEAL}"]


def _newest_sealed_step(path: str) -> int:
    """Return the newest step whose checkpoint has hashes.

    Raises:
        ConfigError: if there is no such checkpoint.
    """
    folder = run_folder(path) / "checkpoints"
    steps = SavedSteps(folder).steps() if folder.exists() else []
    sealed = [step for step in steps if (folder / str(step) / SEAL).exists()]
    if not sealed:
        rule = "is a run without a checkpoint yet; let it save one"
        raise ConfigError([Mistake("init_from", path, rule)])
    return max(sealed)


def _program_of(
    model: ModelConfig, optimizer: OptimizerConfig, program: ConfiguredProgram
) -> ConfiguredProgram:
    """Return the program of the other run's model on the devices of this run."""
    own_config = program.config
    model = replace(
        model,
        attention=own_config.model.attention,
        compute_dtype=own_config.model.compute_dtype,
        dropout=own_config.model.dropout,
    )
    config = replace(own_config, model=model, optimizer=optimizer)
    return make_program(config, [*program.mesh.devices.flat])


def _model_mistakes(
    path: str, other: ModelConfig, own: ModelConfig
) -> Iterator[Mistake]:
    """Yield a mistake for each key in which the model of the run at `path` differs."""
    for change in config_differences(Config(model=other), Config(model=own)):
        if not is_covered(change.key, _FREE_KEYS):
            old = as_typed(change.old)
            new = as_typed(change.new)
            rule = f"has {change.key}={old}, this run {new}"
            yield Mistake("init_from", path, rule)
    theirs, ours = (model.vocab_size or 0 for model in (other, own))
    if theirs > ours:
        rule = f"has {theirs} tokens, model.vocab_size is {ours}; set it to {theirs}"
        yield Mistake("init_from", path, rule)
