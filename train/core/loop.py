"""The training loop: take a step, then log, evaluate and save what is due.

A step is dispatched before the metrics of the previous one are read: the host waits for
the devices only to log, to evaluate and to save. `step.py` defines the step, and
train/start.py runs before and after the loop.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import jax

from data.batches import Order
from data.sources import Sources
from train.console import Progress, show_compilation
from train.core.due import Due, due_after
from train.core.feed import Feed, local_rows
from train.core.phases import CompiledSteps, PhaseSteps
from train.core.program import Program
from train.core.state import TrainState, best_params, make_finite_check
from train.distributed.fault_injection import FaultInjection
from train.distributed.preemption import SAVE, Preemption
from train.distributed.processes import Cluster
from train.distributed.replicas import compare_replicas, make_checksums
from train.distributed.watchdog import Watchdog
from train.errors import ABORTED, DIVERGED, Exit
from train.evaluate.evaluator import Evaluator
from train.evaluate.results import validation_line
from train.evaluate.tasks import Tasks
from train.evaluate.validation import as_metrics
from train.log_window import LogWindow
from train.run.checkpoint import Checkpoints
from train.run.directory import RunDir
from train.run.profiles import Profiler
from train.run.starts import checkpoint_metadata
from train.run.validations import PART
from train.units import few

log = logging.getLogger(__name__)


class _Instruments(NamedTuple):
    """The batches, and everything that observes the steps."""

    feed: Feed
    window: LogWindow
    profiler: Profiler
    faults: FaultInjection
    progress: Progress


@dataclass(frozen=True)
class Trainer:
    """The training loop, with everything that it uses."""

    program: Program
    phases: PhaseSteps
    sources: Sources
    order: Order
    run: RunDir
    checkpoints: Checkpoints
    cluster: Cluster
    preemption: Preemption
    watchdog: Watchdog
    evaluator: Evaluator
    tasks: Tasks | None

    def train(self, state: TrainState) -> tuple[int, TrainState]:
        """Train until the last step, a request to stop, or divergence.

        Returns:
            The exit code (0 after the last step) and the state.
        """
        config = self.program.config
        watchdog = self.watchdog
        start_step = int(state.step)
        num_steps = config.train.num_steps
        if start_step >= num_steps:
            return 0, state
        self._wait_for_compilation(start_step)
        with self._open_instruments(start_step) as instruments:
            window = instruments.window
            progress = instruments.progress
            for step in range(start_step + 1, num_steps + 1):
                # Dispatch the step; its metrics stay on the devices.
                state = self._take_step(step, state, instruments)

                # Agree with the other processes on what is due, and log.
                request = self.preemption.step_done(step)
                due = due_after(step, config, request, self.checkpoints.due(step))
                if due.log or due.stop:
                    watchdog.pace(window.close(step, progress, write=due.log))
                elif due.evaluate or due.score_tasks or due.save:
                    window.read(step, progress)
                if window.skipped_in_a_row > config.train.max_skipped_steps:
                    return DIVERGED, self._report_divergence(step, state, instruments)

                # Evaluate, compare replicas and save.
                if due.evaluate or due.score_tasks:
                    with window.pause("eval"), watchdog.during("eval"):
                        due = self._evaluate(step, state, due, progress)
                if due.check:
                    with window.pause("check"), watchdog.during("eval"):
                        self._check_replicas(step, state)
                if due.save:
                    with window.pause("save"), watchdog.during("save"):
                        self._save(step, state, due.last, progress)
                elif self.run.write and self.checkpoints.due_by_time():
                    self.preemption.request(SAVE)
                if due.stop:
                    progress.note(f"asked to stop: saved step {step:,}")
                    return due.stop, state
        return 0, state

    def _wait_for_compilation(self, start_step: int) -> None:
        """Wait until all processes have compiled the steps of the first phase.

        Processes that find the step in the compilation cache are ready early. Without
        this barrier, their watchdogs could fire while they wait for the others.
        """
        with self.phase("compile"), show_compilation(self.run.write):
            self._steps(start_step + 1)
            limit_s = self.program.config.watchdog.compile_timeout_s
            self.cluster.wait("compiled", limit_s)

    @contextmanager
    def _open_instruments(self, start_step: int) -> Iterator[_Instruments]:
        """Open the instruments of a loop that begins after `start_step` updates."""
        run = self.run
        config = self.program.config
        # Read no batches after the last step: a source may reach its limit of epochs.
        num_steps = config.train.num_steps
        programs = self.phases.programs
        batches = self.order.batches(
            start_step, lambda phase: local_rows(programs[phase].batch), num_steps
        )
        steps = range(start_step, num_steps)
        likes = (programs[self.order.phase(step)].batch for step in steps)
        feed = Feed(batches, likes, self.watchdog.phase)
        window = LogWindow(programs, run, self.order, feed)
        profiler = Profiler(
            run,
            self.cluster,
            self.preemption,
            text=lambda step: self._steps(step).plain.as_text(),
            pause=window.pause,
        )
        is_allowed = config.runtime.allow_fault_injection
        faults = FaultInjection(self.cluster.process, is_allowed)
        self.preemption.step_done(start_step)
        peak_known = window.peak is not None
        progress = Progress(num_steps, start_step, peak_known, show=run.write)
        with closing(progress), closing(profiler):
            yield _Instruments(feed, window, profiler, faults, progress)

    def _take_step(
        self, step: int, state: TrainState, instruments: _Instruments
    ) -> TrainState:
        """Dispatch one step, and return its state, which may still be in flight."""
        self._begin_phase(step)
        steps = self._steps(step)
        window = instruments.window
        instruments.profiler.before(step)
        watched = steps.watched if window.should_watch(step) else None
        state, metrics = (watched or steps.plain)(state, next(instruments.feed))
        window.add(metrics)
        if jax.default_backend() == "cpu":  # Steps in flight deadlock virtual devices.
            jax.block_until_ready(metrics)
        instruments.profiler.after(step, metrics)
        self.watchdog.phase("log", step)
        return instruments.faults.after(step, state, self.program)

    def _steps(self, step: int) -> CompiledSteps:
        """Return the compiled steps of a step's phase."""
        return self.phases.get(self.order.batch_number(step - 1))

    def _begin_phase(self, step: int) -> None:
        """Wait for compiled steps, and record the wait, if a step begins a phase."""
        phase = self.order.phase(step - 1)
        if step == 1 or phase == self.order.phase(step - 2):
            return
        start_s = time.monotonic()
        with self.watchdog.during("compile"):
            self._steps(step)
        waited_s = time.monotonic() - start_s
        shape = {"rows": phase.rows, "length": phase.length}
        self.run.events.record("phase", step=step, **shape, waited_s=waited_s)

    def _report_divergence(
        self, step: int, state: TrainState, instruments: _Instruments
    ) -> TrainState:
        """Report divergence; take a watched step, which may show the layer to blame."""
        steps = self._steps(step)
        window = instruments.window
        log.error(_DIVERGED, step, window.skipped_in_a_row)
        is_last = step == self.program.config.train.num_steps
        if steps.watched and not window.culprit and not is_last:
            state, metrics = steps.watched(state, next(instruments.feed))
            window.add(metrics)
            window.read(step + 1, instruments.progress)
        return state

    @contextmanager
    def phase(self, name: str, event: str | None = None) -> Iterator[None]:
        """Set the watchdog's phase for a block, and record the block's duration."""
        self.watchdog.phase(name)
        yield
        self.run.events.lap(event or name)

    def score_tasks(self, state: TrainState) -> dict[str, float]:
        """Score the state on `eval.tasks`; return {} if there are none."""
        params = best_params(state)
        beat = self.watchdog.beat
        return self.tasks.score(params, beat) if self.tasks else {}

    def _evaluate(
        self, step: int, state: TrainState, due: Due, progress: Progress
    ) -> Due:
        """Score the state, show and log the scores, and return the updated `due`.

        With `checkpoint.keep_best`, the best loss so far makes a save due.
        """
        config = self.program.config
        metrics = self.score_tasks(state) if due.score_tasks else {}
        scores = {}
        if due.evaluate:
            scores = self.evaluator.score(best_params(state))
            metrics |= as_metrics(scores, PART)
            progress.note(validation_line(step, scores, self.run.validations))
        self.run.log(step, metrics)
        if not scores:
            return due
        score = scores[""]
        if not self.checkpoints.record_loss(step, score.loss, score.num_targets):
            return due
        check = config.train.replica_check_interval_steps is not None
        return due._replace(save=True, check=check)

    def _save(
        self, step: int, state: TrainState, is_last: bool, progress: Progress
    ) -> None:
        """Begin to save the state of `step`, and report a failed save.

        Raises:
            Exit: if a value of the state is not finite; the state is not saved.
        """
        if names := self._list_not_finite(state):
            raise Exit(
                DIVERGED,
                f"step {step} is not saved: there are values that are not finite in "
                f"{few(names)}. Lower the learning rate, or go back and leave batches "
                f"out: run.rewind_to, data.skip_batches",
            )
        run = self.run
        mesh = self.program.mesh.shape
        schedule_steps = run.continuation.schedule_steps
        metadata = checkpoint_metadata(
            run.config, self.sources, mesh, schedule_steps, run.branch
        )
        if failure := self.checkpoints.save(step, state, metadata, is_last):
            run.events.record("save_failed", step=step, error=failure)
            progress.note(failure)

    def _check_replicas(self, step: int, state: TrainState) -> None:
        """Raise Exit if replicas of an array on two devices are not bitwise equal."""
        program = self.program
        if self._compute_checksums is None:
            return
        findings = compare_replicas(
            self._compute_checksums(state), program.state, program.mesh
        )
        for finding in findings:
            self.run.events.record("corrupt", step=step, **finding._asdict())
        if findings:
            raise Exit(
                ABORTED,
                f"step {step}: silent corruption: {few([*map(str, findings)])}. No "
                "state was saved since. Check that device",
            )

    @functools.cached_property
    def _list_not_finite(self) -> Callable[[TrainState], list[str]]:
        """A function that lists a state's arrays with values that are not finite."""
        return make_finite_check(self.program.state, self.program.mesh)

    @functools.cached_property
    def _compute_checksums(self):
        return make_checksums(self.program.state, self.program.mesh)


_DIVERGED = (
    "step %d: the last %d updates were skipped, because they were not finite or "
    "spikes. Lower the learning rate, raise train.max_skipped_steps, or go back and "
    "leave out their batches with run.rewind_to and data.skip_batches"
)
