"""A run is a directory, open for one start: its lease, its logs, its results.

Process 0 alone looks and writes; the others are told. What the starts before recorded,
and whether this one may continue them: train/run/starts.py.
"""

import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from etils import epath

from data.sources import Sources
from train.config import Config
from train.distributed.preemption import Crash, Preemption
from train.distributed.processes import Cluster
from train.errors import CRASHED, CRASHES_AGAIN, OWNED, Exit, exit_code
from train.identity import run_dir, run_name
from train.run.lease import Lease, take_lease
from train.run.metrics import EventLog, MetricsLog, read_events
from train.run.starts import Continuation, compare_with_run, record_start
from train.run.storage import run_folder, write_whole
from train.run.tracker import NoTracker, Tracker, open_tracker
from train.run.versions import code_version

log = logging.getLogger(__name__)

_CRASHES = 3  # at the same step: another start would be of no use


@dataclass
class RunDir:
    """One start of a run.

    config: with the batches to leave out of all starts.
    lease: of process 0.
    write: whether this is process 0.
    """

    path: epath.Path
    config: Config
    continuation: Continuation
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
                record_start(self.path, self.config, sources, self.events.start)
            except OSError as error:
                message = f"{self.path}: cannot be written: {error}"
                raise Exit(CRASHED, message) from error
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
        left_out = self.config.data.skip_batches
        rewind_to = self.continuation.rewind_to
        self.events.record("rewind", rewind_to=rewind_to, left_out=left_out)
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
        """Write the results; their presence says that the run is finished."""
        if self.write:
            write_whole(self.path / "results.json", json.dumps(values, indent=2) + "\n")

    def judge_crash(self, crash: Crash) -> int:
        """Record a crash on process 0, and return the exit code.

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

    def before_exit(self, code: int) -> None:
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
            from train.run.report import write_report  # not needed to take a step

            try:
                write_report(self.path)
            except Exception as error:  # it must not hide how the run ended
                log.warning("%s/report.html was not written: %s", self.path, error)


@contextmanager
def open_run(
    config: Config, sources: Sources, cluster: Cluster, preemption: Preemption
) -> Iterator[RunDir]:
    """Open the run's directory, new or old; process 0 looks, and tells the others.

    Args:
        config: settled.
        sources: the data.
        cluster: the processes.
        preemption: learns what to do with the directory before it ends the process.

    Raises:
        Exit: OWNED, if another process is at this run; 1, if the directory cannot be
            read or written.
        ConfigError: naming every key in which this start would make another run of it.
        DataError: if the text is not the one that the run was started on.
    """
    path = run_folder(run_dir(config))

    def lost(reason: str) -> None:
        log.error(reason)
        step = preemption.step
        preemption.crashed(Crash(cluster.process, OWNED, step, reason, known=True))

    def own() -> Lease:
        settings = config.run
        interval_s, timeout_s = settings.lease_interval_s, settings.lease_timeout_s
        return take_lease(os.fspath(path), interval_s, timeout_s, lost)

    with ExitStack() as stack:
        lease = cluster.on_leader(own)
        if lease:
            stack.enter_context(lease)
        run = _open(path, config, sources, cluster, lease)
        preemption.before_exit = run.before_exit
        preemption.judge_crash = run.judge_crash
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
    compared = cluster.broadcast(lambda: compare_with_run(path, config, sources))
    continuation = Continuation(*compared)
    data = replace(config.data, skip_batches=continuation.skip_batches)
    config = replace(config, data=data)
    try:
        events = cluster.on_leader(lambda: EventLog(path))
    except OSError as error:
        raise Exit(CRASHED, f"{path}: cannot be written: {error}") from error
    events = events or EventLog(path, write=False)
    return RunDir(path, config, continuation, events, cluster.is_leader, lease)
