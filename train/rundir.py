"""A run is a directory: what lies in it, and whether this start may continue it."""

import datetime
import importlib.metadata
import json
import logging
import platform
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import yaml
from etils import epath

from data.errors import DataError
from data.sources import Sources
from train.config import Config, ConfigError, Mistake
from train.exits import WRONG_CONFIG, WRONG_DATA, Exit
from train.identity import Difference, Kind, differences, refused, run_dir, run_name
from train.metrics import EventLog, MetricsLog, read_events
from train.report import write_report
from train.schema import read_yaml, to_yaml
from train.tracker import NoTracker, Tracker, open_tracker

log = logging.getLogger(__name__)

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "longhaul")


@dataclass
class RunDir:
    """One start of a run. Only process 0 writes.

    schedule_steps: train.num_steps of the first start, the schedule's length.
    """

    path: epath.Path
    config: Config
    schedule_steps: int
    events: EventLog
    metrics: MetricsLog | None = None
    tracker: Tracker = NoTracker()  # noqa: RUF009 (it does nothing and holds nothing)

    def start_at(self, step: int) -> None:
        """Begin to log after `step` updates; lines of later steps are dropped."""
        write = jax.process_index() == 0
        self.metrics = MetricsLog(self.path, step, write=write)
        self.tracker = open_tracker(
            self.config.tracker,
            self.path,
            run_name(self.config),
            asdict(self.config),
            write=write,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line of metrics.jsonl, and tell the tracker."""
        assert self.metrics is not None
        self.metrics.write(step, values)
        self.tracker.log(step, values)

    def flush(self) -> None:
        """Make the logs outlive this machine; due before a save."""
        assert self.metrics is not None
        self.metrics.flush()
        self.events.flush()

    def results(self) -> dict[str, Any] | None:
        """Read what the end of the run left, if it has come to one."""
        file = self.path / "results.json"
        return json.loads(file.read_text()) if file.exists() else None

    def write_results(self, values: Mapping[str, Any]) -> None:
        """Leave the results; their presence says that the run is finished."""
        if jax.process_index() == 0:
            _write(self.path / "results.json", json.dumps(values, indent=2) + "\n")

    def close(self) -> None:
        """Write what is left, and the report."""
        if self.metrics is not None:
            self.metrics.close()
        self.tracker.finish()
        self.events.close()
        if jax.process_index() == 0:
            write_report(self.path)


@contextmanager
def open_run(config: Config, sources: Sources) -> Iterator[RunDir]:
    """Open the run's directory, new or old.

    Raises:
        ConfigError: naming every key in which this start would make another run of it.
        DataError: if the text is not the one that the run was started on.
    """
    path = epath.Path(run_dir(config))
    if "://" not in str(path):
        path = epath.Path(Path(path).absolute())
    first, changes = path / "config.yaml", list[Difference]()
    schedule_steps = config.train.num_steps
    if first.exists():
        earlier = read_yaml(first)
        changes = differences(earlier, config)
        _refuse(path, refused(changes, config.run.allow_change))
        before = _start_of(path, None).get("changes", {})
        moved = [
            change
            for change in changes
            if change.key.startswith("data.")
            and change.kind is Kind.refused  # but allowed by name
            and before.get(change.key) != _plain(change.new)
        ]
        if moved:
            log.warning("other data from here on: %s", "; ".join(map(str, moved)))
        else:
            check_data(path, sources)
        schedule_steps = earlier.train.num_steps
        if schedule_steps < config.train.num_steps:
            log.info(
                "the schedule keeps the length of the first start, %d steps, and "
                "stays at its last value after them",
                schedule_steps,
            )
    writes = jax.process_index() == 0
    events = EventLog(path, write=writes)
    if writes:
        if not first.exists():
            _write(first, to_yaml(config))
        start = _start(config, sources, changes)
        _write(path / "starts" / f"{events.start}.yaml", yaml.safe_dump(start))
    run = RunDir(path, config, schedule_steps, events)
    try:
        yield run
    except Exception as error:
        events.end(_exit_code(error))
        raise
    finally:
        run.close()


def _exit_code(error: Exception) -> int:
    """Give the code that train/command.py ends the process with."""
    if isinstance(error, Exit):
        return error.code
    known = {ConfigError: WRONG_CONFIG, DataError: WRONG_DATA}
    return known.get(type(error), 1)


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
    file = epath.Path(directory) / "config.yaml"
    if not file.exists():
        rule += f"; there is no {file}"
        raise ConfigError([Mistake("run.dir", directory, rule)])
    changes = _start_of(file.parent, step).get("changes", {})
    config = read_yaml(file, changes=changes)
    return replace(config, run=replace(config.run, dir=directory))


def _start_of(path: epath.Path, step: int | None) -> dict[str, Any]:
    """Read what was recorded of the last start, or of the last that took a step."""
    numbers = [int(file.stem) for file in (path / "starts").glob("*.yaml")]
    if step is not None:
        events = read_events(path)
        restored = {e["start"]: e["step"] for e in events if e["event"] == "restore"}
        numbers = [n for n in numbers if restored.get(n, step + 1) <= step]
    if not numbers:
        return {}
    return yaml.safe_load((path / "starts" / f"{max(numbers)}.yaml").read_text())


def about(config: Config, sources: Sources, mesh: Mapping[str, int], step: int) -> dict:
    """Describe a checkpoint, as JSON beside it."""
    return {
        "step": step,
        "config": to_yaml(config),
        "data_fingerprint": sources.fingerprint,
        "mesh": dict(mesh),
        "versions": _versions(),
    }


def _refuse(path: epath.Path, changes: list[Difference]) -> None:
    if changes:
        rule = (
            "differs from the run in {path}, which has {old}; take it back, start "
            "another run.name, or add run.allow_change=[{key}]"
        )
        raise ConfigError(
            [
                Mistake(c.key, c.new, rule.format(path=path, old=c.old, key=c.key))
                for c in changes
            ]
        )


def check_data(path: epath.Path, sources: Sources) -> None:
    """Compare the text with the one that a run was started on.

    Raises:
        DataError: if they differ.
    """
    recorded = _start_of(path, None).get("data_fingerprints")
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


def _start(
    config: Config, sources: Sources, changes: list[Difference]
) -> dict[str, Any]:
    return {
        "time": datetime.datetime.fromtimestamp(time.time(), datetime.UTC).isoformat(),
        "host": socket.gethostname(),
        "processes": jax.process_count(),
        "devices": [str(device) for device in jax.devices()],
        "changes": {change.key: _plain(change.new) for change in changes},
        "data_fingerprints": sources.fingerprints,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "versions": _versions(),
        "mesh": asdict(config.mesh),
    }


def _plain(value: object) -> object:
    return value if isinstance(value, int | float | list | None) else str(value)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _git_commit() -> str | None:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _write(file: epath.Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.parent / f".{file.name}.tmp"
    new.write_text(text)
    new.replace(file)
