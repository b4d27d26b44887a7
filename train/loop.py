"""The training loop: take a step, then log, evaluate and save what is due.

A step is dispatched before the metrics of the one before it are read: the host waits
for the devices only to log, to evaluate and to save. What a step computes is in
train/step.py; what comes before the loop and after it, in train/start.py.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from data.batches import Order
from data.sources import Sources
from train.config import Config
from train.console import Progress
from train.distributed.fault_injection import FaultInjection
from train.distributed.preemption import SAVE, Preemption
from train.distributed.processes import Cluster
from train.distributed.replicas import compare, make_checksums
from train.distributed.watchdog import Watchdog
from train.errors import ABORTED, DIVERGED, Exit
from train.evaluate.results import validation_line
from train.evaluate.tasks import Tasks
from train.evaluate.validation import Score, as_metrics, evaluate_all
from train.feed import Feed, local_rows
from train.log_window import LogWindow
from train.program import Program
from train.run.checkpoint import Checkpoints
from train.run.directory import RunDir
from train.run.profiles import Profiler
from train.run.starts import checkpoint_metadata
from train.state import TrainState, best_params, make_finite_check
from train.units import few

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainer:
    """What the loop works with, and what it does now and then."""

    program: Program
    compiling: Future[list[Any]]  # the train step, and the watched one if need be
    sources: Sources
    order: Order
    run: RunDir
    checkpoints: Checkpoints
    cluster: Cluster
    preemption: Preemption
    watchdog: Watchdog
    tasks: Tasks | None

    def train(self, state: TrainState) -> tuple[int, TrainState]:
        """Step until the end, a request to stop, or divergence.

        Returns:
            The exit code, 0 at the end, and the state.
        """
        program, run, config = self.program, self.run, self.program.config
        preemption, watchdog = self.preemption, self.watchdog
        checkpoints = self.checkpoints
        first, end = int(state.step), config.train.num_steps
        if first >= end:
            return 0, state
        with self.phase("compile"):
            train_step, *watched_step = self.compiling.result()
            # Else who finds it in the cache would be found idle at its first step.
            self.cluster.wait("compiled", config.watchdog.compile_timeout_s)
        # What follows the last step may be more than a source with a limit has.
        batches = self.order.batches(first, local_rows(program.batch), end)
        feed = Feed(batches, program.batch, watchdog.phase)
        window = LogWindow(program, run, self.order, feed)
        rest = preemption, train_step.as_text, window.pause
        profiler = Profiler(run, self.cluster, *rest)
        allowed = config.runtime.allow_fault_injection
        faults = FaultInjection(self.cluster.process, allowed)
        await_steps = jax.default_backend() == "cpu"  # its devices deadlock otherwise
        preemption.step_done(first)
        shown = window.peak is not None, run.write
        with closing(Progress(end, first, *shown)) as progress, closing(profiler):
            for step in range(first + 1, end + 1):
                profiler.before(step)
                watched = window.is_to_watch(step)
                take = watched_step[0] if watched else train_step
                state, metrics = take(state, next(feed))
                window.add(metrics)
                if await_steps:
                    jax.block_until_ready(metrics)
                profiler.after(step, metrics)
                watchdog.phase("log", step)
                state = faults.after(step, state, program)
                request = preemption.step_done(step)
                due = due_after(step, config, request, checkpoints.due(step))
                if due.log or due.stop:
                    watchdog.pace(window.close(step, progress, write=due.log))
                elif due.evaluate or due.judge or due.save:
                    window.read(step, progress)
                if window.skipped_in_a_row > config.train.max_skipped_steps:
                    log.error(_DIVERGED, step, window.skipped_in_a_row)
                    if watched_step and not window.culprit and step < end:
                        # It may show what is wrong.
                        state, metrics = watched_step[0](state, next(feed))
                        window.add(metrics)
                        window.read(step + 1, progress)
                    return DIVERGED, state
                if due.evaluate or due.judge:
                    with window.pause("eval"), watchdog.during("eval"):
                        due = self._evaluate(step, state, due, progress)
                if due.check:
                    with window.pause("check"), watchdog.during("eval"):
                        self._check_copies(step, state)
                if due.save:
                    with window.pause("save"), watchdog.during("save"):
                        self._save(step, state, due.last, progress)
                elif run.write and checkpoints.overdue():
                    preemption.request(SAVE)
                if due.stop:
                    progress.note(f"asked to stop: saved step {step:,}")
                    return due.stop, state
        return 0, state

    @contextmanager
    def phase(self, name: str, event: str | None = None) -> Iterator[None]:
        """Watch the block, and record what it took."""
        self.watchdog.phase(name)
        yield
        self.run.events.lap(event or name)

    def evaluate(self, state: TrainState, num_batches: int) -> dict[str, Score]:
        """Score the state on all validation sets."""
        params, beat = best_params(state), self.watchdog.beat
        return evaluate_all(self.program, params, self.sources, num_batches, beat)

    def judge(self, state: TrainState) -> dict[str, float]:
        """Judge the state by the tasks, if there are any."""
        params, beat = best_params(state), self.watchdog.beat
        return self.tasks.scores(params, beat) if self.tasks else {}

    def _evaluate(
        self, step: int, state: TrainState, due: "Due", progress: Progress
    ) -> "Due":
        """Score the state, and show and log that; return what is due then.

        A state that is the best so far is due to be saved.
        """
        config = self.program.config
        metrics = self.judge(state) if due.judge else {}
        scores = {}
        if due.evaluate:
            scores = self.evaluate(state, config.eval.num_batches)
            metrics |= as_metrics(scores)
            progress.note(validation_line(step, scores, self.run.validations))
        if step < config.train.num_steps:  # else the final evaluation is logged
            self.run.log(step, metrics)
        if not scores or not self.checkpoints.judge(step, scores[""].loss):
            return due
        check = config.train.replica_check_interval_steps is not None
        return due._replace(save=True, check=check)

    def _save(
        self, step: int, state: TrainState, last: bool, progress: Progress
    ) -> None:
        """Begin to save the state of `step`; tell what came to nothing.

        Raises:
            Exit: DIVERGED, if a value of the state is not finite.
        """
        if names := self.not_finite(state):
            raise Exit(
                DIVERGED,
                f"step {step} is not saved: there are values that are not finite in "
                f"{few(names)}. Lower the learning rate, or go back and leave batches "
                f"out: run.rewind_to, data.skip_batches",
            )
        run, mesh = self.run, self.program.mesh.shape
        length = run.continuation.schedule_steps
        metadata = checkpoint_metadata(run.config, self.sources, mesh, length)
        if failure := self.checkpoints.save(step, state, metadata, last):
            run.events.record("save_failed", step=step, error=failure)
            progress.note(failure)

    def _check_copies(self, step: int, state: TrainState) -> None:
        """Compare what several devices hold.

        Raises:
            Exit: ABORTED, if a device has other bits than its copies.
        """
        program = self.program
        if self._checksums is None:
            return
        findings = compare(self._checksums(state), program.state, program.mesh)
        for finding in findings:
            self.run.events.record("corrupt", step=step, **finding._asdict())
        if findings:
            more = f" and {len(findings) - 3} more" if findings[3:] else ""
            raise Exit(
                ABORTED,
                f"step {step}: silent corruption: {'; '.join(map(str, findings[:3]))}"
                f"{more}. Nothing was saved since. Look at that device",
            )

    @functools.cached_property
    def not_finite(self) -> Callable[[TrainState], list[str]]:
        """Lists the arrays of a state with values that are not finite."""
        return make_finite_check(self.program.state, self.program.mesh)

    @functools.cached_property
    def _checksums(self):
        return make_checksums(self.program.state, self.program.mesh)


class Due(NamedTuple):
    """What is to be done right after a step.

    last: nothing is trained after it by this process.
    stop: the exit code to leave with then, if somebody asked for it.
    """

    log: bool
    evaluate: bool
    judge: bool
    check: bool
    save: bool
    last: bool
    stop: int | None


def due_after(
    step: int, config: Config, request: str | int | None, save_due: bool
) -> Due:
    """Return what is due right after a step.

    Args:
        step: completed updates.
        config: its intervals.
        request: what all processes agreed to do after this step: SAVE, or an exit
            code; after the last step the run ends whatever was requested.
        save_due: whether checkpoint.save_interval_steps calls for a save.
    """
    end = step == config.train.num_steps
    stop = None if request == SAVE or end or request is None else int(request)
    last = end or stop is not None
    save = last or request == SAVE or save_due
    check_interval = config.train.replica_check_interval_steps or 0
    return Due(
        log=end or step % config.log.interval_steps == 0,
        # The last step is scored when all is over, unless it may be the best.
        evaluate=config.checkpoint.keep_best
        if end
        else step % config.eval.interval_steps == 0,
        judge=bool(config.eval.tasks)
        and not end
        and step % config.eval.task_interval_steps == 0,
        check=check_interval > 0 and (save or step % check_interval == 0),
        save=save,
        last=last,
        stop=stop,
    )


_DIVERGED = (
    "step %d: the last %d updates were left out, not finite or spikes; lower the "
    "learning rate, raise train.max_skipped_steps, or go back and leave their batches "
    "out: run.rewind_to, data.skip_batches"
)
