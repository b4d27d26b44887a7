"""Begin a run with a copy of another run's checkpoint: a branch of a trunk.

The copy has the branch's identity, config and schedule length in its description, so
every start of the branch, the first included, continues it like any other run. The
trunk is only read.
"""

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from etils import epath

from data.phases import Phase, batch_number, phases_of
from data.sources import Sources
from data.storage import copy_file, is_remote, write_atomically
from train.cli.schema import read_yaml
from train.config import Config
from train.errors import ConfigError, Mistake
from train.identity import ALLOWED, config_differences
from train.masking import mask
from train.optimizer.schedule import make_schedule
from train.run.continuation import check_changes
from train.run.digests import (
    copy_step,
    is_sealed,
    misplacement,
    read_description,
    saved_steps,
)
from train.run.jsonl_reader import part_paths
from train.run.records import read_record
from train.run.starts import checkpoint_metadata, recorded_run_id

log = logging.getLogger(__name__)

RECORD = "branch.json"
_ALLOWED = {
    *ALLOWED,
    *("schedule", "optimizer.learning_rate", "optimizer.muon_learning_rate"),
    *("optimizer.weight_decay", "optimizer.muon_weight_decay", "optimizer.groups"),
}
_BATCH_KEYS = {"data.batch_schedule", "data.sequence_schedule", "data.skip_batches"}


def begin_branch(
    path: epath.Path,
    config: Config,
    sources: Sources,
    step: epath.Path,
    beat: Callable[[], object],
) -> None:
    """Copy the trunk's checkpoint and metrics, unless the branch has begun already.

    Logs a warning if the learning rate jumps where the branch begins.

    `path` is the branch's directory, which this process owns, `sources` is its data,
    and `step` is the folder of the checkpoint. `beat` is called after each copied file.

    Raises:
        ConfigError: there is no such checkpoint, the branch changes a key that it may
            not change, or `path` is another run.
        DataError: the data is not that of the trunk.
    """
    checkpoints, run = step.parents[:2]
    trunk = f"{run}@{step.name}"
    has_begun = (path / "config.yaml").exists() or _sealed_steps(path / "checkpoints")
    origin = {
        "run": mask(str(run)),
        "run_id": recorded_run_id(run),
        "step": int(step.name),
    }
    record = read_record(path / RECORD, "Choose another run.name.") or {}
    is_same = all(record.get(key) == origin[key] for key in ("run_id", "step"))
    if (record or has_begun) and not is_same:
        rule = f"is the directory of a run that is not a branch of {trunk}; choose "
        raise ConfigError([Mistake("run.dir", str(path), f"{rule}another run.name")])
    if has_begun:
        return
    if is_remote(path) and not is_remote(run):
        rule = f"must be a local folder, because the trunk {run} is one"
        raise ConfigError([Mistake("run.dir", str(path), rule)])
    try:
        old, saved = _trunk(step)
        metadata = _metadata(step, old, saved, config, sources)
        write_atomically(path / RECORD, json.dumps(origin, indent=1) + "\n")
        for part in part_paths(run, "metrics").values():
            copy_file(part, path / part.relative_to(run))
        copy_step(step, path / "checkpoints" / step.name, metadata, beat)
    except FileNotFoundError:  # the trunk may have deleted it in the meantime
        rule = "names no checkpoint, or one that is damaged or of another run; "
        rule += f"{run} has those of {_sealed_steps(checkpoints)}"
        raise ConfigError([Mistake("from", trunk, rule)]) from None
    print(f"branch      of {trunk}", flush=True)
    _warn_of_jump(step, config, old, saved.get("schedule_steps"))


def _trunk(step: epath.Path) -> tuple[Config, dict[str, Any]]:
    """Return the config of a checkpoint, and its whole description.

    Raises:
        FileNotFoundError: there is no such checkpoint, or it cannot be used.
    """
    run, saved = step.parents[1], read_description(step) or {}
    is_misplaced = misplacement(step, recorded_run_id(run)) is not None
    if not is_sealed(step) or "config" not in saved or is_misplaced:
        raise FileNotFoundError(step)
    return read_yaml(step, text=saved["config"]), saved


def _metadata(
    step: epath.Path,
    old: Config,
    saved: Mapping[str, Any],
    config: Config,
    sources: Sources,
) -> dict[str, Any]:
    """Return what the description of a branch's first checkpoint says of the branch.

    `old` and `saved` are the trunk's config and description at this checkpoint.

    Raises:
        ConfigError, DataError: as `begin_branch`.
    """
    if config.train.num_steps <= int(step.name):
        rule = f"must be above {step.name}, the step at which the branch begins"
        raise ConfigError([Mistake("train.num_steps", config.train.num_steps, rule)])
    run, number = step.parents[1], int(step.name)
    is_same = _batches_before(number, old) == _batches_before(number, config)
    allowed = _ALLOWED | _BATCH_KEYS if is_same else _ALLOWED - _BATCH_KEYS
    changes = config_differences(old, config, allowed)
    check_changes(run, old, config, sources=sources, last_start=saved, changes=changes)
    mesh, num_steps = saved.get("mesh", {}), config.train.num_steps
    metadata = checkpoint_metadata(config, sources, mesh, num_steps)
    return metadata | {"run_id": uuid.uuid4().hex}


def _warn_of_jump(
    step: epath.Path, config: Config, old: Config, old_steps: int | None
) -> None:
    """Log a warning if the trunk's schedule has another factor at this step.

    `old_steps` is the length of the trunk's schedule. None means its train.num_steps.
    """

    def factor_at(config: Config, num_steps: int) -> float:
        factor = make_schedule(config.schedule.in_steps(config.data), num_steps)
        return float(factor(jnp.int32(int(step.name))))

    factor = factor_at(config, config.train.num_steps)
    old_factor = factor_at(old, old_steps or old.train.num_steps)
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


def _batches_before(step: int, config: Config) -> tuple[int, list[Phase]]:
    """Return the number of the last batch before a step, and the phases until it."""
    last = batch_number(step - 1, config.data.skip_batches)
    return last, [p for p in phases_of(config.data) if p.first_batch <= last]
