"""Begin a run with a copy of another run's checkpoint: a branch of a trunk.

The copy has the branch's identity, config and schedule length in its description, so
every start of the branch, the first included, continues it like any other run. The
trunk is only read.
"""

import json
import uuid
from collections.abc import Callable
from typing import NamedTuple

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

    Args:
        path: the directory of the branch, which this process owns.
        config: the config of the branch.
        sources: the data of the branch.
        trunk: the checkpoint to continue from.
        beat: called after each copied file.

    Raises:
        ConfigError: there is no such checkpoint, the branch changes a key that it may
            not change, or `path` is another run.
        DataError: the data is not that of the trunk, or the checkpoint is damaged.
    """
    run = existing_run(trunk.directory, "from")
    run_id, steps = recorded_run_id(run), saved_steps(path / "checkpoints")
    has_begun = (path / "config.yaml").exists() or any(
        is_sealed(path / "checkpoints" / str(step)) for step in steps
    )
    origin = {"run": str(run), "run_id": run_id, "step": trunk.step}
    record = read_record(path / RECORD, _REMEDY) or ({} if has_begun else origin)
    if any(record.get(key) != origin[key] for key in ("run_id", "step")):
        rule = f"is the directory of a run that is not a branch of {trunk}; "
        raise ConfigError([Mistake("run.dir", path, f"{rule}choose another run.name")])
    if has_begun:
        return
    if is_remote(path) and not is_remote(run):
        rule = f"must be a local folder, because the trunk {run} is one"
        raise ConfigError([Mistake("run.dir", path, rule)])
    step = run / "checkpoints" / str(trunk.step)
    if not is_sealed(step):
        raise _missing(run, trunk)
    description = read_description(step) or {}
    if "config" not in description or misplacement(step, run_id):
        raise DataError(f"{step}: is damaged, or of another run. Choose another step")
    saved_config = read_yaml(step, text=description["config"])
    _check_batches(saved_config, config, trunk.step)
    allowed = [*BRANCH_ALLOWED]
    if _phases_before(config, trunk.step) == _phases_before(saved_config, trunk.step):
        allowed += ["data.batch_schedule", "data.sequence_schedule"]
    changes = [
        c._replace(kind=ChangeKind.allowed) if is_covered(c.key, allowed) else c
        for c in config_differences(saved_config, config)
    ]
    check_changes(run, saved_config, config, sources, description, changes)
    print(mask(f"branch      of {trunk}"), flush=True)
    mesh, num_steps = description.get("mesh", {}), config.train.num_steps
    metadata = checkpoint_metadata(config, sources, mesh, num_steps)
    metadata["run_id"] = uuid.uuid4().hex
    write_atomically(path / RECORD, json.dumps(origin, indent=1) + "\n")
    try:
        for part in part_paths(run, "metrics").values():
            copy_file(part, path / part.relative_to(run))
            beat()
        copy_step(step, path / "checkpoints" / step.name, metadata, beat)
    except FileNotFoundError:  # the trunk has deleted the checkpoint in the meantime
        raise _missing(run, trunk) from None


def _missing(run: epath.Path, trunk: Trunk) -> ConfigError:
    """Return the error for a step that has no checkpoint, with the steps that do."""
    checkpoints = run / "checkpoints"
    steps = [s for s in saved_steps(checkpoints) if is_sealed(checkpoints / str(s))]
    rule = f"names no checkpoint. {run} has those of steps {steps}"
    return ConfigError([Mistake("from", trunk, rule)])


def _check_batches(saved_config: Config, config: Config, step: int) -> None:
    """Check that the first `step` steps skip the same batches in both configs."""
    skips, saved_skips = config.data.skip_batches, saved_config.data.skip_batches
    if batch_number(step - 1, skips) != batch_number(step - 1, saved_skips):
        rule = f"changes the batches of the first {step} steps, which the trunk has "
        rule += f"taken with {saved_skips}; skip only later batches in addition, or "
        rule += "branch from an earlier step"
        raise ConfigError([Mistake("data.skip_batches", skips, rule)])


def _phases_before(config: Config, step: int) -> list[Phase]:
    """Return the phases of the batches of the first `step` steps."""
    last_batch = batch_number(step - 1, config.data.skip_batches)
    return [p for p in phases_of(config.data) if p.first_batch <= last_batch]
