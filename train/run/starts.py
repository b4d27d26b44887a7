"""The starts of a run: what each one recorded, and whether another may continue it.

`config.yaml` is the config of the first start and is never rewritten. Start n leaves
`starts/<n>.yaml`: the keys in which it differs from the first, the fingerprints of its
data, the machine, and the versions of all that decides what a step computes.
"""

import datetime
import json
import logging
import platform
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from etils import epath

from data.errors import DataError
from data.sources import Sources
from train.cli.schema import read_yaml, renamed, to_yaml
from train.config import Config
from train.errors import ConfigError, Mistake
from train.identity import ChangeKind, Difference, differences, refused
from train.run.metrics import read_events
from train.run.storage import run_folder, write_whole
from train.run.versions import versions

log = logging.getLogger(__name__)


class Continuation(NamedTuple):
    """How a start goes on from those before it.

    schedule_steps: train.num_steps of the first start, the schedule's length.
    known_skips: data.skip_batches of earlier starts.
    skip_batches: the batches that any start leaves out.
    rewind_to: run.rewind_to, unless an earlier start has done it.
    finished: whether the run has come to its end.
    """

    schedule_steps: int
    known_skips: list[int]
    skip_batches: list[int]
    rewind_to: int | None
    finished: bool


def compare_with_run(
    path: epath.Path, config: Config, sources: Sources
) -> Continuation:
    """Return the `Continuation` of the run in a folder by a start with this config.

    Nothing is written.

    Raises:
        ConfigError: naming every key in which this start would make another run of it.
        DataError: if the text is not the one that the run was started on.
    """
    first, num_steps = path / "config.yaml", config.train.num_steps
    skip_batches, rewind_to = config.data.skip_batches, config.run.rewind_to
    if not first.exists():
        return Continuation(num_steps, [], skip_batches, None, False)
    earlier, last = read_yaml(first), newest_start(path)
    changes = differences(earlier, config)
    rule = (
        "differs from the run in {path}, which has {old}; take it back, start "
        "another run.name, or add run.allow_change=[{key}]"
    )
    if wrong := refused(changes, config.run.allow_change):
        rules = [rule.format(path=path, old=c.old, key=c.key) for c in wrong]
        new = zip(wrong, rules, strict=True)
        raise ConfigError([Mistake(c.key, c.new, rule) for c, rule in new])
    _check_changed_data(path, sources, changes, last.get("changes", {}))
    known_skips = last.get("changes", {}).get("data.skip_batches")
    known_skips = known_skips or earlier.data.skip_batches
    skip_batches = _merged(known_skips, skip_batches)
    if rewind_to is not None and any(
        event.get("rewind_to") == rewind_to and event.get("left_out") == skip_batches
        for event in read_events(path)
    ):
        log.warning(
            "run.rewind_to=%d was done by an earlier start, and is not done again; to "
            "go back there once more give run.rewind_to=%d",
            *(rewind_to, rewind_to + 1),
        )
        rewind_to = None
    results_step = read_results(path).get("step", -1)
    _check_end(path, config, rewind_to, results_step, last)
    schedule_steps = earlier.train.num_steps
    if schedule_steps < num_steps:
        log.info(
            "the schedule keeps the length of the first start, %d steps, and "
            "stays at its last value after them",
            schedule_steps,
        )
    finished = rewind_to is None and results_step >= num_steps
    return Continuation(schedule_steps, known_skips, skip_batches, rewind_to, finished)


def _check_end(
    path: epath.Path,
    config: Config,
    rewind_to: int | None,
    results_step: int,
    last: Mapping[str, Any],
) -> None:
    """Refuse an end that a run which is not finished has passed already."""
    folder = path / "checkpoints"
    names = [p.name for p in folder.iterdir()] if folder.exists() else []
    newest = max((int(name) for name in names if name.isdigit()), default=0)
    if rewind_to is not None:
        newest = min(newest, rewind_to)
    num_steps = config.train.num_steps
    if results_step < newest > num_steps:
        asked = last.get("changes", {}).get("train.num_steps")
        asked = asked or read_yaml(path / "config.yaml").train.num_steps
        rule = (
            f"is below step {newest}, which the run in {path} has reached on its way "
            f"to {asked}; give at least {newest}, go back with run.rewind_to, or start "
            f"another run.name"
        )
        raise ConfigError([Mistake("train.num_steps", num_steps, rule)])


def _check_changed_data(
    path: epath.Path,
    sources: Sources,
    changes: list[Difference],
    before: Mapping[str, Any],
) -> None:
    """Check the data, unless this is the first start with other data, allowed by name.

    Raises:
        DataError: if they differ.
    """
    moved = [
        change
        for change in changes
        if change.key.startswith("data.")
        and change.kind is ChangeKind.refused  # but allowed by name
        and before.get(change.key) != _yaml_value(change.new)
    ]
    if moved:
        log.warning("other data from here on: %s", "; ".join(map(str, moved)))
    else:
        check_data(path, sources)


def check_data(path: epath.Path, sources: Sources) -> None:
    """Compare the text with the one that a run was started on.

    Raises:
        DataError: if they differ.
    """
    recorded = newest_start(path).get("data_fingerprints")
    if recorded is None:
        return
    lines = [
        f"  {name}: was {recorded.get(name, 'not there')}, now {now or 'not there'}"
        for name, now in {**dict.fromkeys(recorded), **sources.fingerprints}.items()
        if recorded.get(name) != now
    ]
    if lines:
        raise DataError(
            f"{path}: the run was started on other data than {sources.path}, whose "
            f"fingerprint differs:\n"
            + "\n".join(lines)
            + "\nbring that data back, or start another run.name"
        )


def _merged(known: list[int], added: list[int]) -> list[int]:
    """Unite two lists of first and last batch, ascending."""
    pairs = [*zip(known[::2], known[1::2], strict=True)]
    pairs += zip(added[::2], added[1::2], strict=True)
    merged: list[int] = []
    for first, last in sorted(set(pairs)):
        if merged and first <= merged[-1]:
            merged[-1] = max(merged[-1], last)
        else:
            merged += [first, last]
    return merged


def newest_start(path: epath.Path, step: int | None = None) -> dict[str, Any]:
    """Read what the last start recorded; {} if there is none.

    Args:
        path: of the run.
        step: the last start that took this step instead.
    """
    files = (path / "starts").glob("*.yaml")
    numbers = [int(file.stem) for file in files if file.stem.isdigit()]
    if step is not None:
        events = read_events(path)
        restored = {e["start"]: e["step"] for e in events if e["event"] == "restore"}
        numbers = [n for n in numbers if restored.get(n, step + 1) <= step]
    if not numbers:
        return {}
    start = yaml.safe_load((path / "starts" / f"{max(numbers)}.yaml").read_text())
    changes = start.get("changes", {}).items()
    return {**start, "changes": dict(renamed(key, value) for key, value in changes)}


def read_run(directory: str | None, step: int | None = None) -> Config:
    """Read the config of an existing run, with what its starts changed.

    Args:
        directory: of the run.
        step: as it was when the batch of this step was trained on; None: as it is.

    Raises:
        ConfigError: if run.dir is not given or holds no run.
    """
    rule = "must name the directory of a run, say run.dir=runs/base"
    if not directory:
        raise ConfigError([Mistake("run.dir", directory, rule)])
    file = run_folder(directory) / "config.yaml"
    if not file.exists():
        rule += f"; there is no {file}"
        raise ConfigError([Mistake("run.dir", directory, rule)])
    changes = newest_start(file.parent, step).get("changes", {})
    config = read_yaml(file, changes=changes)
    return replace(config, run=replace(config.run, dir=directory))


def read_results(path: epath.Path) -> dict[str, Any]:
    """Read what the end of the run left; empty if it has not come to one."""
    file = path / "results.json"
    return json.loads(file.read_text()) if file.exists() else {}


def record_start(
    path: epath.Path, config: Config, sources: Sources, start: int
) -> None:
    """Write `starts/<start>.yaml`, and at the first start `config.yaml`.

    Raises:
        OSError: if the folder cannot be written.
    """
    import jax  # not for those who only read

    first, changes = path / "config.yaml", []
    if first.exists():
        changes = differences(read_yaml(first), config)
    else:
        write_whole(first, to_yaml(config))
    record = {
        "time": datetime.datetime.fromtimestamp(time.time(), datetime.UTC).isoformat(),
        "host": socket.gethostname(),
        "processes": jax.process_count(),
        "devices": [str(device) for device in jax.devices()],
        "changes": {change.key: _yaml_value(change.new) for change in changes},
        "data_fingerprints": sources.fingerprints,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "versions": versions(),
        "mesh": json.loads(json.dumps(asdict(config.mesh))),  # choices are words
    }
    write_whole(path / "starts" / f"{start}.yaml", yaml.safe_dump(record))


def checkpoint_metadata(
    config: Config, sources: Sources, mesh: Mapping[str, int], step: int
) -> dict[str, Any]:
    """Describe a checkpoint, as JSON beside it."""
    return {
        "step": step,
        "config": to_yaml(config),
        "data_fingerprint": sources.fingerprint,
        "mesh": dict(mesh),
        "versions": versions(),
    }


def _yaml_value(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_yaml_value(each) for each in value]
    return value if isinstance(value, int | float | None) else str(value)


def _git_commit() -> str | None:
    here = Path(__file__).parents[1]
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
