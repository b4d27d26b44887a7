"""Begin a run with a copy of another run's checkpoint: a branch of a trunk.

The copy has the branch's identity, config and schedule length in its description, so
every start of the branch, the first included, continues it like any other run. The
trunk is only read.
"""

import json
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

from data.errors import DataError
from data.phases import Phase, batch_number, phases_of
from data.sources import Sources
from data.storage import copy_file, is_remote, write_atomically
from train.cli.schema import read_yaml
from train.config import Config
from train.errors import ConfigError, Mistake
from train.identity import BRANCH_ALLOWED, ChangeKind, config_differences, is_covered
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
from train.run.records import read_record
from train.run.starts import checkpoint_metadata, existing_run, recorded_run_id

RECORD = "branch.json"
_BATCH_KEYS = ("data.batch_schedule", "data.sequence_schedule", "data.skip_batches")
_REMEDY = "Delete it if this run is a branch of the named checkpoint."


class Trunk(NamedTuple):
    """A checkpoint of another run: the directory of the run, and the step."""

    directory: str
    step: int

    def __str__(self) -> str:
        return f"{self.directory}@{self.step}"


def begin_branch(
    path: epath.Path,
    config: Config,
    sources: Sources,
    trunk: Trunk,
    beat: Callable[[], object] = lambda: None,
) -> None:
    """Copy the trunk's checkpoint and metrics, unless the branch has begun already.

    `path` is the branch's directory, which this process owns, and `sources` is its
    data. `beat` is called after each copied file.

    Raises:
        ConfigError: there is no such checkpoint, the branch changes a key that it may
            not change, or `path` is another run.
        DataError: the data is not that of the trunk, or the checkpoint is damaged.
    """
    run = existing_run(trunk.directory, "from")
    checkpoints, run_id = run / "checkpoints", recorded_run_id(run)
    has_begun = (path / "config.yaml").exists() or _sealed_steps(path / "checkpoints")
    origin = {"run": str(run), "run_id": run_id, "step": trunk.step}
    record = read_record(path / RECORD, _REMEDY) or ({} if has_begun else origin)
    if any(record.get(key) != origin[key] for key in ("run_id", "step")):
        rule = f"is the directory of a run that is not a branch of {trunk}; choose "
        raise ConfigError([Mistake("run.dir", str(path), f"{rule}another run.name")])
    if has_begun:
        return
    if is_remote(path) and not is_remote(run):
        rule = f"must be a local folder, because the trunk {run} is one"
        raise ConfigError([Mistake("run.dir", str(path), rule)])
    step = checkpoints / str(trunk.step)
    try:
        metadata = _metadata(run, config, sources, step)
        write_atomically(path / RECORD, json.dumps(origin, indent=1) + "\n")
        for part in part_paths(run, "metrics").values():
            copy_file(part, path / part.relative_to(run))
        copy_step(step, path / "checkpoints" / step.name, metadata, beat)
    except FileNotFoundError:  # the trunk may have deleted it in the meantime
        rule = f"names no checkpoint; {run} has those of {_sealed_steps(checkpoints)}"
        raise ConfigError([Mistake("from", str(trunk), rule)]) from None
    print(mask(f"branch      of {trunk}"), flush=True)


def _metadata(
    run: epath.Path, config: Config, sources: Sources, step: epath.Path
) -> dict[str, Any]:
    """Return what the description of a branch's first checkpoint says of the branch.

    Raises:
        ConfigError, DataError: as `begin_branch`.
        FileNotFoundError: there is no such checkpoint.
    """
    if not is_sealed(step):
        raise FileNotFoundError(step)
    saved = read_description(step) or {}
    if "config" not in saved or misplacement(step, recorded_run_id(run)):
        raise DataError(f"{step}: is damaged, or of another run. Choose another step")
    old, index = read_yaml(step, text=saved["config"]), int(step.name) - 1
    changes = config_differences(old, config)
    for i, change in enumerate(changes):
        if is_covered(change.key, _BATCH_KEYS):
            is_later = _batches_up_to(index, old) == _batches_up_to(index, config)
            kind = ChangeKind.allowed if is_later else ChangeKind.refused
            changes[i] = change._replace(kind=kind)
        elif is_covered(change.key, BRANCH_ALLOWED):
            changes[i] = change._replace(kind=ChangeKind.allowed)
    check_changes(run, old, config, sources=sources, last_start=saved, changes=changes)
    mesh, num_steps = saved.get("mesh", {}), config.train.num_steps
    metadata = checkpoint_metadata(config, sources, mesh, num_steps)
    return metadata | {"run_id": uuid.uuid4().hex}


def _sealed_steps(checkpoints: epath.Path) -> list[int]:
    return [s for s in saved_steps(checkpoints) if is_sealed(checkpoints / str(s))]


def _batches_up_to(index: int, config: Config) -> tuple[int, list[Phase]]:
    """Return the number of the batch of the step `index`, and the phases until it."""
    last = batch_number(index, config.data.skip_batches)
    return last, [p for p in phases_of(config.data) if p.first_batch <= last]
