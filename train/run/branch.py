"""Begin a run with a copy of another run's checkpoint: a branch of a trunk.

The copy has the branch's identity, config and schedule length in its description, so
every start of the branch, the first included, continues it like any other run. The
trunk is only read, and only until the copy is complete: `branch.json` and each
checkpoint of the branch record its origin, with the trunk's config at that time.
"""

import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from etils import epath

from data.config import DataConfig
from data.errors import DataError, Mistake
from data.phases import Phase, batch_number, phases_of
from data.storage import NotAFileError, copy_file, is_remote
from train.cli.schema import config_yaml, read_yaml
from train.config import Config, DistributedConfig, RunConfig
from train.core.optimizer.schedule import Factor, make_schedule
from train.errors import CRASHED, ConfigError, Exit
from train.identity import ALLOWED, config_differences
from train.masking import mask
from train.run.continuation import check_changes
from train.run.digests import (
    copy_step,
    is_sealed,
    misplacement,
    read_description,
    saved_steps,
)
from train.run.jsonl_reader import part_paths
from train.run.origin import read_origin, recorded_origin, write_origin
from train.run.starts import existing_run, read_run, recorded_run_id, start_numbers
from train.run.this_start import ThisStart

log = logging.getLogger(__name__)

_ALLOWED = {
    *ALLOWED,
    *("schedule", "optimizer.learning_rate", "optimizer.muon_learning_rate"),
    *("optimizer.weight_decay", "optimizer.muon_weight_decay", "optimizer.groups"),
}
_BATCH_KEYS = {"data.batch_schedule", "data.sequence_schedule", "data.skip_batches"}


def base_config(path: epath.Path | None, step: epath.Path) -> str:
    """Return the base of a branch's config as YAML, without keys of the trunk's starts.

    A branch that has begun in the directory `path` has recorded its base. Otherwise the
    base is the config with which the trunk has trained the checkpoint `step`.

    Raises:
        ConfigError: there is no trunk, or its config cannot be read.
    """
    if path is not None and _has_begun(path) and (origin := read_origin(path)):
        return origin["config"]
    trunk = existing_run(str(step.parents[1]), "from")
    base = read_run(str(trunk), int(step.name))
    data = base.data
    if not data.document_mask:  # The key has no effect and may not be given.
        data = replace(data, document_start=None)
    own = {"run": RunConfig(), "distributed": DistributedConfig()}
    return config_yaml(replace(base, data=data, **own))


def begin_branch(
    step: epath.Path, branch: ThisStart, beat: Callable[[], object]
) -> None:
    """Copy the trunk's checkpoint and metrics, unless the branch has begun already.

    Logs a warning if the learning rate jumps where the branch begins.

    `step` is the folder of the checkpoint. `branch` is a start of the branch, whose
    directory this process owns. `beat` is called after each copied file.

    Raises:
        ConfigError: there is no such checkpoint, the branch changes a key that it may
            not change, or its directory is that of another run.
        DataError: the data is not that of the trunk, or the checkpoint is damaged.
        Exit: CRASHED, if the checkpoint cannot be copied.
    """
    path = branch.path
    config = branch.config
    checkpoints, run = step.parents[:2]
    trunk = f"{run}@{step.name}"
    has_begun = _has_begun(path)
    origin = read_origin(path)
    if (origin or has_begun) and not _is_origin_of(step, origin):
        rule = f"is the directory of a run that is not a branch of {trunk}; choose "
        raise ConfigError([Mistake("run.dir", str(path), f"{rule}another run.name")])
    if has_begun and origin is not None:
        if recorded_origin(path) is None:  # the file is lost, or damaged
            with suppress(OSError):
                write_origin(path, origin)
        return
    if is_remote(path) and not is_remote(run):
        rule = f"must be a local folder, because the trunk {run} is one"
        raise ConfigError([Mistake("run.dir", str(path), rule)])
    try:
        checkpoint = _read_checkpoint(step)
        origin = {"run": mask(str(run)), "run_id": recorded_run_id(run)}
        origin |= {"step": int(step.name), "config": base_config(None, step)}
        metadata = _metadata(checkpoint, branch) | {"branch": origin}
        write_origin(path, origin)
        for part in part_paths(run, "metrics").values():
            copy_file(part, path / part.relative_to(run))
        copy_step(step, path / "checkpoints" / step.name, metadata, beat)
    except FileNotFoundError:  # the trunk may have deleted it in the meantime
        rule = "names no checkpoint, or one that is damaged or of another run; "
        rule += f"{run} has those of {_sealed_steps(checkpoints)}"
        raise ConfigError([Mistake("from", trunk, rule)]) from None
    except NotAFileError as error:
        message = f"{step}: {error}. Begin at another checkpoint of {run}"
        raise DataError(message) from None
    except OSError as error:
        message = f"{path}: {trunk} cannot be copied: {error}. The same command copies "
        raise Exit(CRASHED, f"{message}it again") from error
    print(f"branch      of {trunk}", flush=True)
    schedule = config.schedule.in_steps(config.data)
    old_schedule = checkpoint.config.schedule.in_steps(checkpoint.config.data)
    _warn_of_jump(
        step,
        make_schedule(schedule, config.train.num_steps),
        make_schedule(old_schedule, checkpoint.description["schedule_steps"]),
    )


def _has_begun(path: epath.Path) -> bool:
    """Return whether a run has a complete checkpoint, or had its first start."""
    return bool(
        (path / "config.yaml").exists()
        or _sealed_steps(path / "checkpoints")
        or start_numbers(path)
        or part_paths(path, "events")
    )


def _is_origin_of(step: epath.Path, origin: Mapping[str, Any] | None) -> bool:
    """Return whether a branch began at a checkpoint, given its recorded origin.

    The trunk may have been moved, replaced or deleted.
    """
    if origin is None or origin["step"] != int(step.name):
        return False
    run = step.parents[1]
    if origin["run"] == mask(str(run)):
        return True
    if run_id := recorded_run_id(run):
        return run_id == origin.get("run_id")
    return epath.Path(origin["run"]).name == run.name


class _TrunkCheckpoint(NamedTuple):
    """The checkpoint at which a branch begins, without its arrays.

    folder: the folder of the checkpoint.
    config: the config of the trunk at this checkpoint.
    description: the whole description of the checkpoint.
    """

    folder: epath.Path
    config: Config
    description: dict[str, Any]


def _read_checkpoint(step: epath.Path) -> _TrunkCheckpoint:
    """Return the checkpoint in a folder.

    Raises:
        FileNotFoundError: there is no such checkpoint, or it cannot be used.
    """
    run = step.parents[1]
    saved = read_description(step) or {}
    is_misplaced = misplacement(step, recorded_run_id(run)) is not None
    is_whole = {"config", "mesh", "schedule_steps"} <= saved.keys()
    if not is_sealed(step) or not is_whole or is_misplaced:
        raise FileNotFoundError(step)
    return _TrunkCheckpoint(step, read_yaml(step, text=saved["config"]), saved)


def _metadata(checkpoint: _TrunkCheckpoint, branch: ThisStart) -> dict[str, Any]:
    """Return what the description of a branch's first checkpoint says of the branch.

    Raises:
        ConfigError, DataError: as `begin_branch`.
    """
    config = branch.config
    step = int(checkpoint.folder.name)
    if config.train.num_steps <= step:
        rule = f"must be above {step}, the step at which the branch begins"
        raise ConfigError([Mistake("train.num_steps", config.train.num_steps, rule)])
    batches = _batches_before(step, checkpoint.config.data)
    is_same = batches == _batches_before(step, config.data)
    allowed = _ALLOWED | _BATCH_KEYS if is_same else _ALLOWED - _BATCH_KEYS
    changes = config_differences(checkpoint.config, config, allowed)
    check_changes(
        checkpoint.folder.parents[1],
        changes,
        branch,
        saved_model=checkpoint.config.model,
        last_start=checkpoint.description,
    )
    mesh = checkpoint.description["mesh"]
    metadata = branch.checkpoint_metadata(mesh, config.train.num_steps)
    return metadata | {"run_id": uuid.uuid4().hex}


def _warn_of_jump(step: epath.Path, schedule: Factor, old_schedule: Factor) -> None:
    """Log a warning if the trunk's schedule has another factor at this step."""
    count = jnp.int32(int(step.name))
    factor = float(schedule(count))
    old_factor = float(old_schedule(count))
    if abs(factor - old_factor) > 0.01:
        log.warning(
            "the learning rate jumps at step %s: it has %.0f%% of the peak, and %.0f%% "
            "in the trunk; if you did not mean that, change schedule.* or begin at "
            "another step, with another run.name",
            step.name,
            100 * factor,
            100 * old_factor,
        )


def _sealed_steps(checkpoints: epath.Path) -> list[int]:
    return [s for s in saved_steps(checkpoints) if is_sealed(checkpoints / str(s))]


def _batches_before(step: int, data: DataConfig) -> tuple[int, list[Phase]]:
    """Return the number of the last batch before a step, and the phases until it."""
    last = batch_number(step - 1, data.skip_batches)
    return last, [p for p in phases_of(data) if p.first_batch <= last]
