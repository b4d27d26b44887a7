"""A run from its start, or from where it was stopped, to its end.

The loop dispatches a step before it reads the metrics of the one before: the host waits
for the devices only to log, to evaluate and to save.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from data.batches import Order, batch_number
from data.errors import DataError
from data.sources import Sources
from train.config import Config
from train.console import Progress
from train.describe import describe, describe_data
from train.distributed.fault_injection import Drill
from train.distributed.preemption import SAVE, Crash, Requests
from train.distributed.processes import Cluster, exit_code, join
from train.distributed.replicas import compare, make_checksums
from train.distributed.watchdog import Watchdog
from train.errors import ABORTED, CRASHES_AGAIN, DIVERGED, ConfigError, Exit, Mistake
from train.evaluation import Score, evaluate
from train.feed import Feed, local_rows
from train.identity import run_dir
from train.log_window import Profiler, Window
from train.preflight import Prepared
from train.program import Program, make_program
from train.results import print_results, results
from train.run.checkpoint import Checkpoints
from train.run.directory import RunDir, about, open_run, read_results
from train.run.storage import run_folder
from train.runtime import set_up
from train.state import TrainState, best_params

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What one start of a run works with."""

    program: Program
    sources: Sources
    order: Order
    run: RunDir
    checkpoints: Checkpoints
    cluster: Cluster
    requests: Requests
    watchdog: Watchdog

    @contextmanager
    def phase(self, name: str, event: str | None = None) -> Iterator[None]:
        """Watch the block, and record what it took."""
        self.watchdog.phase(name)
        yield
        self.run.events.lap(event or name)

    def save(self, step: int, state: TrainState, last: bool) -> str | None:
        """Begin to save the state of `step`; say what came to nothing."""
        mesh = self.program.mesh.shape
        notes = about(self.program.config, self.sources, mesh, step)
        failure = self.checkpoints.save(step, state, notes, last)
        if failure:
            self.run.events.record("save_failed", step=step, error=failure)
        return failure

    def evaluate(self, step: int, state: TrainState, num_batches: int) -> Score:
        """Score the state and log it."""
        params, beat = best_params(state), self.watchdog.beat
        score = evaluate(self.program, params, self.sources, num_batches, beat)
        values = {"eval/loss": score.loss, "eval/bits_per_byte": score.bits_per_byte}
        self.run.log(step, values)
        return score

    def check_copies(self, step: int, state: TrainState) -> None:
        """Compare what several devices hold.

        Raises:
            Exit: ABORTED, if a device has other bits than its copies.
        """
        program = self.program
        if self._checksums is None:
            return
        found = compare(self._checksums(state), program.state, program.mesh)
        for finding in found:
            self.run.events.record("corrupt", step=step, **finding._asdict())
        if found:
            more = f" and {len(found) - 3} more" if found[3:] else ""
            raise Exit(
                ABORTED,
                f"step {step}: silent corruption: {'; '.join(map(str, found[:3]))}"
                f"{more}. Nothing was saved since. Look at that device",
            )

    @functools.cached_property
    def _checksums(self):
        return make_checksums(self.program.state, self.program.mesh)

    def check_skips(self, step: int) -> None:
        """Refuse to leave out what was trained on before the step to go on from.

        Raises:
            ConfigError: naming how to.
        """
        known, left_out = self.run.known_skips, self.run.config.data.skip_steps
        if step and self.order.batch_number(step - 1) != batch_number(step - 1, known):
            rule = (
                f"leave out batches that the {step} steps so far were trained on; add "
                f"run.rewind_to=<a step before them>"
            )
            raise ConfigError([Mistake("data.skip_steps", left_out, rule)])


def train(config: Config, command: str) -> int:
    """Train, or continue the run of that name.

    Args:
        config: as composed.
        command: what was typed, for the line that says how to go on.

    Returns:
        The exit code: 0 finished, 42 preempted, 130 stopped by a person, 3 diverged.

    Raises:
        ConfigError: if the config does not fit the devices, the data or the run.
        DataError: if the data or every checkpoint is damaged.
        Exit: whatever else ends it for a known reason.
    """
    with Requests() as requests:
        cluster = join(config.distributed, requests.hold)
        requests.connect(cluster)
        set_up(config.runtime)
        folder = run_folder(run_dir(config))
        place = cluster.process, cluster.processes
        with Watchdog(config.watchdog, folder, *place) as watchdog:
            prepared = Prepared(config, cluster)
            config, sources = prepared.config, prepared.sources
            with open_run(config, sources, cluster, requests) as run:
                code = 0
                if not run.finished:
                    code = _start(prepared, run, cluster, requests, watchdog)
        if code == 0 and cluster.first:
            print_results(read_results(run.path), command, config, run.path)
        return code


def _start(
    prepared: Prepared,
    run: RunDir,
    cluster: Cluster,
    requests: Requests,
    watchdog: Watchdog,
) -> int:
    """Start, or go on, and close what was opened."""
    asked, there = prepared.devices_s
    run.events.lap("start", until=asked)
    run.events.lap("init", until=there)
    config, program, sources = run.config, prepared.program, prepared.sources
    try:
        if run.schedule_steps != config.train.num_steps:
            program = make_program(config, schedule_steps=run.schedule_steps)
        order = Order(sources, config.data, config.seed)
        describe(program)
        describe_data(order, config.train.num_steps)
        checkpoints = Checkpoints(
            run.path / "checkpoints",
            config.checkpoint,
            cluster,
            before_save=run.ready_to_save,
        )
        start = Start(
            program, sources, order, run, checkpoints, cluster, requests, watchdog
        )
        run.events.lap("prepare")
        with jax.set_mesh(program.mesh):
            code = _train(start)
        with start.phase("save"):
            checkpoints.close()
    except Exception as error:
        _crashed(error, run, cluster, requests)
        raise
    run.events.end(code)
    return code


def _crashed(
    error: Exception, run: RunDir, cluster: Cluster, requests: Requests
) -> None:
    """Take the other processes along; say so when another start is of no use."""
    said = f"{type(error).__name__}: {error}"
    known = isinstance(error, Exit | ConfigError | DataError)
    place = cluster.process, exit_code(error), requests.step
    crash = Crash(*place, said[:1000], known)
    if cluster.processes > 1:
        # Without words of its own process 0 says it.
        if not requests.leaving and (str(error) or not known):
            log.error("%s", said, exc_info=None if known else error)
        requests.crashed(crash)
    if run.judge(crash) == CRASHES_AGAIN:
        log.error("", exc_info=error)
        raise Exit(
            CRASHES_AGAIN,
            f"crashed after step {crash.step} for the third time, always with this "
            f"code: another start would do the same. The batch it was at: python -m "
            f"data.inspect run.dir={run.path} step={crash.step}",
        ) from None


def _train(start: Start) -> int:
    """Find the state, step to the end, leave the results."""
    program, run = start.program, start.run
    start.watchdog.phase("restore")
    state = start.checkpoints.restore(program.state, at_most=run.rewind_to)
    step = 0 if state is None else int(state.step)
    run.events.lap("restore", step=step)
    start.check_skips(step)
    if run.rewind_to is not None:
        run.rewound()
    with start.phase("compile", "prepare"):
        state = state or program.init()
        run.start_at(step, start.sources)
    print(f"run         {run.path}, from step {step:,}", flush=True)
    code, state = _loop(start, state)
    if code:
        return code
    with start.phase("save"):
        start.checkpoints.wait()  # results say that the run is finished
    start.requests.finished()
    with start.phase("eval"):
        step, batches = int(state.step), program.config.eval.final_num_batches
        score = start.evaluate(step, state, batches)
    with start.phase("eval", "close"):
        params = best_params(state)
        run.write_results(results(program, params, start.sources, step, score))
    return 0


def _loop(start: Start, state: TrainState) -> tuple[int, TrainState]:
    """Step until the end, a request to stop, or divergence."""
    program, run, config = start.program, start.run, start.program.config
    requests, checkpoints, watchdog = start.requests, start.checkpoints, start.watchdog
    first, end = int(state.step), config.train.num_steps
    if first >= end:
        return 0, state
    with start.phase("compile"):
        train_step = program.train_step.lower(program.state, program.batch).compile()
        # Else who finds it in the cache would be found idle at its first step.
        start.cluster.wait("compiled", config.watchdog.compile_timeout_s)
    rows, drill = local_rows(program.batch), Drill(start.cluster.process)
    feed = Feed(start.order.batches(first, rows), program.batch, watchdog.phase)
    window = Window(program, run, start.order, feed)
    profiler = Profiler(config.profile.steps, str(run.path / "profile"))
    await_steps = jax.default_backend() == "cpu"  # its devices deadlock otherwise
    check_interval = config.train.replica_check_interval_steps
    requests.passed(first)
    with Progress(end, first, window.peak is not None, run.write) as progress:
        for step in range(first + 1, end + 1):
            profiler.before(step)
            state, metrics = train_step(state, next(feed))
            window.add(metrics)
            if await_steps:
                jax.block_until_ready(metrics)
            profiler.after(step, metrics)
            watchdog.phase("log", step)
            state = drill.after(step, state, program)
            request, last = requests.passed(step), step == end
            stop = None if request == SAVE or last else request
            due = last or step % config.log.interval_steps == 0
            if due or stop:
                watchdog.pace(window.close(step, progress, write=due))
            if window.skipped_in_a_row > config.train.max_skipped_steps:
                log.error(
                    "step %d: the last %d updates were left out, not finite or spikes; "
                    "lower the learning rate, raise train.max_skipped_steps, or go "
                    "back and leave their batches out: run.rewind_to, data.skip_steps",
                    step,
                    window.skipped_in_a_row,
                )
                return DIVERGED, state
            if step % config.eval.interval_steps == 0 and not last:
                with window.pause("eval"), watchdog.during("eval"):
                    start.evaluate(step, state, config.eval.num_batches)
            save = last or stop or request == SAVE or checkpoints.due(step)
            if check_interval and (save or step % check_interval == 0):
                with window.pause("check"), watchdog.during("eval"):
                    start.check_copies(step, state)
            if save:
                with window.pause("save"), watchdog.during("save"):
                    failure = start.save(step, state, last=last or bool(stop))
                if failure:
                    progress.note(failure)
            elif run.write and checkpoints.overdue():
                requests.ask(SAVE)
            if stop:
                progress.note(f"asked to stop: saved step {step:,}")
                return int(stop), state
    return 0, state
