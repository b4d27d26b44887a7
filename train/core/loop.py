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
from typing import Any, NamedTuple

import jax

from train.config import Config
from train.console import Progress, show_compilation
from train.core.due import Due, due_after
from train.core.feed import Feed, local_rows
from train.core.log_window import LogWindow
from train.core.phases import CompiledSteps, PhaseSteps
from train.core.program import Program
from train.core.services import (
    Batches,
    Journal,
    OpenProfiler,
    Peers,
    Profiler,
    Saves,
    Scorer,
    Watch,
)
from train.core.state import TrainState, best_params, make_finite_check
from train.errors import ABORTED, DIVERGED, Exit
from train.units import few

log = logging.getLogger(__name__)


class _Instruments(NamedTuple):
    """The batches, and everything that observes the steps."""

    feed: Feed
    window: LogWindow
    profiler: Profiler
    progress: Progress


@dataclass(frozen=True)
class Trainer:
    """The training loop, with everything that it uses.

    metadata: JSON that describes the run in each checkpoint.
    peak_flops: FLOP/s that all devices reach at most together; None if unknown.
    """

    config: Config
    program: Program
    phases: PhaseSteps
    batches: Batches
    saves: Saves
    metadata: dict[str, Any]
    journal: Journal
    peers: Peers
    watch: Watch
    scorer: Scorer
    open_profiler: OpenProfiler
    peak_flops: float | None

    def train(self, state: TrainState) -> tuple[int, TrainState]:
        """Train until the last step, a request to stop, or divergence.

        Returns:
            The exit code (0 after the last step) and the state.
        """
        config = self.config
        watch = self.watch
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
                request = self.peers.step_done(step)
                due = due_after(
                    step,
                    config.train,
                    config.log,
                    config.eval,
                    request=request,
                    save_due=self.saves.due(step),
                )
                if due.log or due.stop:
                    watch.pace(window.close(step, progress, write=due.log))
                elif due.evaluate or due.score_tasks or due.save:
                    window.read(step, progress)
                if window.skipped_in_a_row > config.train.max_skipped_steps:
                    return DIVERGED, self._report_divergence(step, state, instruments)

                # Evaluate, compare replicas and save.
                if due.evaluate or due.score_tasks:
                    with window.pause("eval"), watch.during("eval"):
                        due = self._evaluate(step, state, due, progress)
                if due.check:
                    with window.pause("check"), watch.during("eval"):
                        self._check_replicas(step, state)
                if due.save:
                    with window.pause("save"), watch.during("save"):
                        self._save(step, state, due.last, progress)
                elif self.journal.write and self.saves.due_by_time():
                    self.peers.request_save()
                if due.stop:
                    progress.note(f"asked to stop: saved step {step:,}")
                    return due.stop, state
        return 0, state

    def _wait_for_compilation(self, start_step: int) -> None:
        """Wait until all processes have compiled the steps of the first phase."""
        self.watch.phase("compile")
        with show_compilation(self.journal.write):
            self._steps(start_step + 1)
            self.peers.wait_for_compilation()
        self.journal.events.lap("compile")

    @contextmanager
    def _open_instruments(self, start_step: int) -> Iterator[_Instruments]:
        """Open the instruments of a loop that begins after `start_step` updates."""
        # Read no batches after the last step: a source may reach its limit of epochs.
        num_steps = self.config.train.num_steps
        programs = self.phases.programs
        batches = self.batches.batches(
            start_step, lambda phase: local_rows(programs[phase].batch), num_steps
        )
        steps = range(start_step, num_steps)
        likes = (programs[self.batches.phase(step)].batch for step in steps)
        feed = Feed(batches, likes, self.watch.phase)
        window = LogWindow(
            programs,
            self.config.log,
            self.config.data,
            journal=self.journal,
            batches=self.batches,
            feed=feed,
            peak_flops=self.peak_flops,
        )
        profiler = self.open_profiler(
            lambda step: self._steps(step).plain.as_text(), window.pause
        )
        self.peers.step_done(start_step)
        progress = Progress(
            num_steps,
            start_step,
            peak_known=self.peak_flops is not None,
            show=self.journal.write,
        )
        with closing(progress), closing(profiler):
            yield _Instruments(feed, window, profiler, progress)

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
        self.watch.phase("log", step)
        return self.peers.inject_fault(step, state)

    def _steps(self, step: int) -> CompiledSteps:
        """Return the compiled steps of a step's phase."""
        return self.phases.get(self.batches.batch_number(step - 1))

    def _begin_phase(self, step: int) -> None:
        """Wait for compiled steps, and record the wait, if a step begins a phase."""
        phase = self.batches.phase(step - 1)
        if step == 1 or phase == self.batches.phase(step - 2):
            return
        start_s = time.monotonic()
        with self.watch.during("compile"):
            self._steps(step)
        waited_s = time.monotonic() - start_s
        shape = {"rows": phase.rows, "length": phase.length}
        self.journal.events.record("phase", step=step, **shape, waited_s=waited_s)

    def _report_divergence(
        self, step: int, state: TrainState, instruments: _Instruments
    ) -> TrainState:
        """Report divergence; take a watched step, which may show the layer to blame."""
        steps = self._steps(step)
        window = instruments.window
        log.error(_DIVERGED, step, window.skipped_in_a_row)
        is_last = step == self.config.train.num_steps
        if steps.watched and not window.culprit and not is_last:
            state, metrics = steps.watched(state, next(instruments.feed))
            window.add(metrics)
            window.read(step + 1, instruments.progress)
        return state

    def _evaluate(
        self, step: int, state: TrainState, due: Due, progress: Progress
    ) -> Due:
        """Score the state, show and log the scores, and return the updated `due`.

        With `checkpoint.keep_best`, the best loss so far makes a save due.
        """
        params = best_params(state)
        metrics = self.scorer.score_tasks(params) if due.score_tasks else {}
        if not due.evaluate:
            self.journal.log(step, metrics)
            return due
        validation = self.scorer.validate(step, params)
        progress.note(validation.line)
        self.journal.log(step, metrics | validation.metrics)
        if not self.saves.record_loss(step, validation.loss, validation.num_targets):
            return due
        check = self.config.train.replica_check_interval_steps is not None
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
        if failure := self.saves.save(step, state, self.metadata, is_last):
            self.journal.events.record("save_failed", step=step, error=failure)
            progress.note(failure)

    def _check_replicas(self, step: int, state: TrainState) -> None:
        """Raise Exit if replicas of an array on two devices are not bitwise equal."""
        findings = self.peers.find_corruption(state)
        for finding in findings:
            self.journal.events.record("corrupt", step=step, **finding._asdict())
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


_DIVERGED = (
    "step %d: the last %d updates were skipped, because they were not finite or "
    "spikes. Lower the learning rate, raise train.max_skipped_steps, or go back and "
    "leave out their batches with run.rewind_to and data.skip_batches"
)
