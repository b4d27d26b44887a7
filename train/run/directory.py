"""A run is a directory: what lies in it, and whether this start may continue it."""

import datetime
import itertools
import json
import logging
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import yaml
from etils import epath

from data.errors import DataError
from data.sources import Sources
from train.cli.schema import read_yaml, to_yaml
from train.config import Config
from train.distributed.preemption import Crash, Requests
from train.distributed.processes import Cluster, exit_code
from train.errors import CRASHED, CRASHES_AGAIN, OWNED, ConfigError, Exit, Mistake
from train.identity import Difference, Kind, differences, refused, run_dir, run_name
from train.run.lease import Lease, take_lease
from train.run.metrics import EventLog, MetricsLog, read_events
from train.run.report import write_report
from train.run.storage import run_folder, write_whole
from train.run.tracker import NoTracker, Tracker, open_tracker
from train.run.versions import code_version, versions

log = logging.getLogger(__name__)

_CRASHES = 3  # at the same step: another start would be of no use


@dataclass
class RunDir:
    """One start of a run. Only process 0 writes.

    config: with the batches to leave out of all starts.
    schedule_steps: train.num_steps of the first start, the schedule's length.
    known_skips: data.skip_steps of earlier starts.
    rewind_to: run.rewind_to, unless an earlier start has done it.
    finished: whether the run has come to its end.
    lease: of process 0.
    """

    path: epath.Path
    config: Config
    schedule_steps: int
    known_skips: list[int]
    rewind_to: int | None
    finished: bool
    events: EventLog
    write: bool
    lease: Lease | None
    metrics: MetricsLog | None = None
    tracker: Tracker = NoTracker()  # noqa: RUF009 (it does nothing and holds nothing)

    def start_at(self, step: int, sources: Sources) -> None:
        """Record this start, which goes on after `step` updates, and begin to log.

        Lines of later steps are dropped.
        """
        write = self.write
        if write:
            try:
                _record_start(self.path, self.config, sources, self.events.start)
            except OSError as error:
                said = f"{self.path}: cannot be written: {error}"
                raise Exit(CRASHED, said) from error
        self.metrics = MetricsLog(self.path, step, write=write)
        self.tracker = open_tracker(
            self.config.tracker,
            self.path,
            run_name(self.config),
            asdict(self.config),
            write=write,
        )

    def rewound(self) -> None:
        """Record that this start went back, so that no later one does it again."""
        left_out = self.config.data.skip_steps
        self.events.record("rewind", rewind_to=self.rewind_to, left_out=left_out)
        self.events.flush()
        if self.write:
            (self.path / "results.json").unlink(missing_ok=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line of metrics.jsonl, and tell the tracker."""
        assert self.metrics is not None
        self.metrics.write(step, values)
        self.tracker.log(step, values)

    def ready_to_save(self) -> None:
        """Make sure, on process 0, that the run is ours and its logs are kept.

        Raises:
            Exit: OWNED, if another process has taken it.
            OSError: if the logs cannot be written now: a save would be ahead of them.
        """
        assert self.metrics is not None
        assert self.lease is not None
        self.lease.check()
        self.metrics.flush()
        self.events.flush()

    def write_results(self, values: Mapping[str, Any]) -> None:
        """Leave the results; their presence says that the run is finished."""
        if self.write:
            write_whole(self.path / "results.json", json.dumps(values, indent=2) + "\n")

    def judge(self, crash: Crash) -> int:
        """Record a crash on process 0, and give the exit code.

        CRASHES_AGAIN if the last three starts crashed at this step with this code.
        """
        if crash.known:
            return crash.code
        this = {**crash._asdict(), "code_version": code_version()}
        self.events.record("crash", **this)
        starts = itertools.count(self.events.start, -1)
        same = {
            event["start"]
            for event in read_events(self.path)
            if event["event"] == "crash"
            and all(event[key] == this[key] for key in ("step", "code_version"))
        }
        again = all(start in same for start in itertools.islice(starts, _CRASHES))
        return CRASHES_AGAIN if again else crash.code

    def last_words(self, code: int) -> None:
        """Close what must be closed when the process leaves in the midst of things."""
        if code != OWNED:
            self.events.end(code)
            self.events.close()
            if self.metrics is not None:
                self.metrics.close()
            if self.lease is not None:
                self.lease.close()

    def close(self) -> None:
        """Write what is left, and the report."""
        if self.metrics is not None:
            self.metrics.close()
        self.tracker.finish()
        self.events.close()
        if self.write:
            try:
                write_report(self.path)
            except Exception as error:  # it must not hide how the run ended
                log.warning("%s/report.html was not written: %s", self.path, error)


@contextmanager
def open_run(
    config: Config, sources: Sources, cluster: Cluster, requests: Requests
) -> Iterator[RunDir]:
    """Open the run's directory, new or old; process 0 looks, and tells the others.

    Args:
        config: settled.
        sources: the data.
        cluster: the processes.
        requests: learns what to do with the directory before it ends the process.

    Raises:
        Exit: OWNED, if another process is at this run; 1, if the directory cannot be
            read or written.
        ConfigError: naming every key in which this start would make another run of it.
        DataError: if the text is not the one that the run was started on.
    """
    path = run_folder(run_dir(config))

    def lost(why: str) -> None:
        log.error(why)
        requests.crashed(Crash(cluster.process, OWNED, requests.step, why, known=True))

    def own() -> Lease:
        settings = config.run
        interval_s, timeout_s = settings.lease_interval_s, settings.lease_timeout_s
        return take_lease(os.fspath(path), interval_s, timeout_s, lost)

    with ExitStack() as stack:
        lease = cluster.alone(own)
        if lease:
            stack.enter_context(lease)
        run = _open(path, config, sources, cluster, lease)
        requests.last_words, requests.judge = run.last_words, run.judge
        try:
            yield run
        except Exception as error:
            run.events.end(exit_code(error))
            raise
        finally:
            run.close()


def _open(
    path: epath.Path,
    config: Config,
    sources: Sources,
    cluster: Cluster,
    lease: Lease | None,
) -> RunDir:
    told = cluster.tell(lambda: _compare(path, config, sources))
    data = replace(config.data, skip_steps=told["skip_steps"])
    config = replace(config, data=data)
    try:
        events = cluster.alone(lambda: EventLog(path)) or EventLog(path, write=False)
    except OSError as error:
        raise Exit(CRASHED, f"{path}: cannot be written: {error}") from error
    return RunDir(
        path,
        config,
        told["schedule_steps"],
        told["known_skips"],
        told["rewind_to"],
        told["finished"],
        events,
        cluster.first,
        lease,
    )


def _compare(path: epath.Path, config: Config, sources: Sources) -> dict[str, Any]:
    """Compare this start with the run there is, if there is one."""
    first, results = path / "config.yaml", read_results(path)
    if not first.exists():
        return {
            "schedule_steps": config.train.num_steps,
            "known_skips": [],
            "skip_steps": config.data.skip_steps,
            "rewind_to": None,
            "finished": False,
        }
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
    known = before.get("data.skip_steps") or earlier.data.skip_steps
    skip_steps = _merged(known, config.data.skip_steps)
    rewind_to = config.run.rewind_to
    if rewind_to is not None and any(
        event.get("rewind_to") == rewind_to and event.get("left_out") == skip_steps
        for event in read_events(path)
    ):
        log.info("run.rewind_to=%d was done by an earlier start", rewind_to)
        rewind_to = None
    steps = config.train.num_steps
    return {
        "schedule_steps": schedule_steps,
        "known_skips": known,
        "skip_steps": skip_steps,
        "rewind_to": rewind_to,
        "finished": rewind_to is None and bool(results) and results["step"] >= steps,
    }


def _merged(known: list[int], added: list[int]) -> list[int]:
    """Put two lists of first and last batch together, ascending."""
    pairs = [*zip(known[::2], known[1::2], strict=True)]
    pairs += zip(added[::2], added[1::2], strict=True)
    merged: list[int] = []
    for first, last in sorted(set(pairs)):
        if merged and first <= merged[-1]:
            merged[-1] = max(merged[-1], last)
        else:
            merged += [first, last]
    return merged


def _record_start(
    path: epath.Path, config: Config, sources: Sources, start: int
) -> None:
    first = path / "config.yaml"
    changes = differences(read_yaml(first), config) if first.exists() else []
    if not first.exists():
        write_whole(first, to_yaml(config))
    text = yaml.safe_dump(_start(config, sources, changes))
    write_whole(path / "starts" / f"{start}.yaml", text)


def read_results(path: epath.Path) -> dict[str, Any]:
    """Read what the end of the run left; empty if it has not come to one."""
    file = path / "results.json"
    return json.loads(file.read_text()) if file.exists() else {}


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
        "versions": versions(),
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
        "versions": versions(),
        "mesh": asdict(config.mesh),
    }


def _plain(value: object) -> object:
    return value if isinstance(value, int | float | list | None) else str(value)


def _git_commit() -> str | None:
    here = Path(__file__).parents[1]
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
