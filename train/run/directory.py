"""The directory of a run, open for one start: its lease, logs and results.

Only process 0 reads and writes; it broadcasts what the others need. run/starts.py reads
the records of starts, and run/continuation.py decides whether a start may continue.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from etils import epath

from data.errors import DataError
from data.phases import tokens_before
from data.storage import write_atomically
from train.config import Config
from train.distributed.preemption import Crash, Preemption
from train.distributed.processes import Cluster
from train.errors import CRASHED, CRASHES_AGAIN, OWNED, Exit, exit_code
from train.identity import run_name
from train.masking import mask, mask_values
from train.records import json_compatible
from train.run.catalog import VIEWS
from train.run.continuation import Continuation, compare_with_run
from train.run.folder import check_layout
from train.run.jsonl import Appender
from train.run.lease import Lease, take_lease
from train.run.metrics import (
    EventLog,
    newest_metrics,
    open_metrics,
    read_events,
    tokens_at,
)
from train.run.origin import read_origin
from train.run.starts import start_numbers
from train.run.this_start import Begin, ThisStart
from train.run.trackers.writer import TrackedRun
from train.run.validations import Validations, read_validations, updated_validations
from train.run.versions import code_version
from train.run.views import RunTracker

log = logging.getLogger(__name__)

_MAX_CRASHES = 3  # consecutive crashes at one step that end the run for good


@dataclass
class RunDir:
    """A run's directory, open for one start.

    this_start: the start; its config's data.skip_batches includes the batches of
        earlier starts.
    lease: the claim on the run; None except on process 0.
    write: whether this is process 0.
    validations: the evaluations so far, on process 0.
    branch: the content of branch.json; None if the run is not a branch.
    """

    this_start: ThisStart
    continuation: Continuation
    events: EventLog
    write: bool
    lease: Lease | None
    metrics: Appender | None = None
    validations: Validations = field(default_factory=Validations)
    tracker: RunTracker | None = None
    branch: dict[str, Any] | None = None

    def __post_init__(self):
        """Prepare the report that a thread writes during training."""
        self.report = VIEWS.open_report(self.path)

    @property
    def path(self) -> epath.Path:
        """The run's directory."""
        return self.this_start.path

    @property
    def config(self) -> Config:
        """The config of this start."""
        return self.this_start.config

    def start_at(self, step: int) -> None:
        """Record this start, which continues after `step` updates, and open the logs.

        Lines of later steps are dropped. If `step` is the last, its score is dropped
        too, because this start computes it again.
        """
        if self.write:
            number = self.events.start
            continuation = self.continuation
            at_end = step == self.config.train.num_steps
            try:
                self.this_start.record(
                    number,
                    continuation.schedule_steps,
                    run_id=continuation.run_id,
                    step=step,
                )
                self.metrics = open_metrics(self.path, step, scored_again=at_end)
            except OSError as error:
                message = f"{self.path}: cannot be written: {error}"
                raise Exit(CRASHED, message) from error
            self.validations = read_validations(self.path)
            log_interval = self.config.log.interval_steps
            if step >= log_interval and next(newest_metrics(self.path), None) is None:
                log.warning(
                    "%s: there is no line of the %d steps so far. Unless they were "
                    "logged less often, the file was emptied or deleted. Training goes "
                    "on; its curves begin here",
                    *(self.path / "metrics.jsonl", step),
                )
            self.tracker = VIEWS.open_tracker(
                self.config.tracker,
                TrackedRun(
                    self.path,
                    mask(run_name(self.config)),
                    mask_values(asdict(self.config)),
                    step=step,
                    start=self.events.start,
                ),
            )

    def record_rewind(self) -> None:
        """Record that this start has rewound, so that no later start rewinds again."""
        # Remove the results first: otherwise a kill in between leaves a finished run.
        if self.write:
            (self.path / "results.json").unlink(missing_ok=True)
        left_out = self.config.data.skip_batches
        rewind_to = self.continuation.rewind_to
        self.events.record("rewind", rewind_to=rewind_to, left_out=left_out)
        self.events.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line to metrics.jsonl and to the trackers."""
        if self.metrics is not None:
            self.metrics.append({"step": step, **values})
        self.validations = updated_validations(self.validations, step, values)
        if self.tracker is not None:
            self.tracker.log(step, values)
        if self.write:
            self.report.update()

    def tokens_at(self, step: int) -> int:
        """Return the number of targets of the first `step` steps; 0 if not `write`."""
        if not self.write:
            return 0
        return tokens_at(self.path, step, partial(tokens_before, self.config.data))

    def prepare_save(self) -> None:
        """Check, on process 0, that this start still owns the run, and flush its logs.

        Raises:
            Exit: OWNED, if another process has taken the run.
            OSError: the logs cannot be written now, so a save would be ahead of them.
        """
        assert self.metrics is not None
        assert self.lease is not None
        self.lease.check()
        self.metrics.flush()
        self.events.flush()

    def record_save(self, step: int) -> None:
        """Record that a checkpoint is complete (run/history.py)."""
        self.events.record("saved", step=step)

    def check_lost(self) -> None:
        """Check, if there is no checkpoint at all, that there never was one.

        Raises:
            DataError: a record of the run shows that there was one.
        """
        if not self.continuation.evidence:
            return
        again = "another run.name"
        if self.branch is not None:
            origin = f"{self.branch['run']}@{self.branch['step']}"
            again = f"python -m train.branch from={origin} and another run.name"
        raise DataError(
            f"{self.path}: {self.continuation.evidence}, but there is no checkpoint in "
            f"{self.path / 'checkpoints'}, and the run does not start over. Put the "
            f"checkpoints back from a copy of the run, or begin again with {again}"
        )

    def write_results(self, values: Mapping[str, Any]) -> None:
        """Write the results, which mark the run as finished.

        Raises:
            Exit: CRASHED, if they cannot be written.
        """
        if self.write:
            text = json.dumps(json_compatible(values), indent=2, allow_nan=False) + "\n"
            file = self.path / "results.json"
            try:
                write_atomically(file, text)
            except OSError as error:
                message = f"{file}: cannot be written: {error}. The last checkpoint is "
                message += "complete: the same command scores it and writes the results"
                raise Exit(CRASHED, message) from error

    def judge_crash(self, crash: Crash) -> int:
        """Record, on process 0, the crash of a process; return the exit code of all.

        The code is CRASHES_AGAIN if the last three starts crashed at this step with the
        same version of the program.
        """
        if crash.known:
            return crash.code
        details = {**crash._asdict(), "code_version": code_version()}
        self.events.record("crash", **details)
        crashed_starts = {
            event["start"]
            for event in read_events(self.path)
            if event["event"] == "crash"
            and all(event.get(key) == details[key] for key in ("step", "code_version"))
        }
        last_starts = range(self.events.start, self.events.start - _MAX_CRASHES, -1)
        is_repeated = crashed_starts.issuperset(last_starts)
        return CRASHES_AGAIN if is_repeated else crash.code

    def before_exit(self, code: int) -> None:
        """Close logs and lease when the process ends in the middle of training.

        If another process owns the run (OWNED), leave its files alone.
        """
        if code != OWNED:
            self.events.end(code)
            self.events.close()
            if self.metrics is not None:
                self.metrics.close()
            if self.lease is not None:
                self.lease.close()

    def close(self) -> None:
        """Write the remaining lines and the report."""
        if self.metrics is not None:
            self.metrics.close()
        if self.tracker is not None:
            self.tracker.finish()
        self.events.close()
        if self.write:
            self.report.close()


@contextmanager
def open_run(
    start: ThisStart,
    cluster: Cluster,
    preemption: Preemption,
    begin: Begin | None = None,
    beat: Callable[[], object] = lambda: None,
) -> Iterator[RunDir]:
    """Open the run's directory, new or existing, on all processes.

    `preemption` closes the directory before it ends the process. `begin` is called for
    a run that begins with something existing, and calls `beat` after each copied file.

    Raises:
        Exit: OWNED, if another process owns the run; CRASHED, if the directory cannot
            be read or written.
        ConfigError: changed keys would make this a different run; all are named.
        DataError: the run has other data, or a small file of the run is damaged.
    """
    path = start.path
    config = start.config

    def on_lost(reason: str) -> None:
        log.error(reason)
        step = preemption.step
        preemption.crashed(Crash(cluster.process, OWNED, step, reason, known=True))

    with ExitStack() as stack:
        cluster.broadcast(lambda: check_layout(path))
        lease = cluster.on_leader(
            lambda: take_lease(
                os.fspath(path),
                interval_s=config.run.lease_interval_s,
                timeout_s=config.run.lease_timeout_s,
                on_lost=on_lost,
            )
        )
        if lease:
            stack.callback(lease.close)
        if begin is not None:
            cluster.broadcast_progress(partial(begin, start), beat)
        branch = cluster.broadcast(lambda: read_origin(path))
        fields = cluster.broadcast(lambda: compare_with_run(start))
        continuation = Continuation(*fields)
        data = replace(config.data, skip_batches=continuation.skip_batches)
        try:
            events = cluster.on_leader(
                lambda: EventLog(path, last_start=max(start_numbers(path), default=0))
            )
        except OSError as error:
            raise Exit(CRASHED, f"{path}: cannot be written: {error}") from error
        run = RunDir(
            replace(start, config=replace(config, data=data)),
            continuation=continuation,
            events=events or EventLog(path, write=False),
            write=cluster.is_leader,
            lease=lease,
            branch=branch,
        )
        preemption.before_exit = run.before_exit
        preemption.judge_crash = run.judge_crash
        try:
            yield run
        except Exception as error:
            run.events.end(exit_code(error))
            raise
        finally:
            run.close()
