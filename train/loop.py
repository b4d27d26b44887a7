"""A run from its start, or from where it was stopped, to its end.

The loop dispatches a step before it reads the metrics of the one before: the host waits
for the devices only to log, to evaluate and to save.
"""

import logging
import time
from dataclasses import dataclass

import jax

from data.batches import Order
from data.sources import Sources, encoding_of, open_sources
from data.tokenizer import padded_vocab_size
from train.checkpoint import Checkpoints
from train.config import Config, ConfigError, Mistake
from train.describe import describe, describe_data
from train.evaluation import Score, evaluate
from train.exits import DIVERGED
from train.feed import Feed, local_rows
from train.interrupt import Interrupt
from train.program import Program, make_program, settle
from train.progress import Progress
from train.rundir import RunDir, about, open_run
from train.runtime import set_up
from train.state import TrainState, best_params
from train.summary import print_results, results
from train.window import Profiler, Window

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What one start of a run works with."""

    program: Program
    sources: Sources
    order: Order
    run: RunDir
    checkpoints: Checkpoints
    interrupt: Interrupt

    def save(self, step: int, state: TrainState) -> None:
        """Begin to save the state of `step`."""
        mesh = self.program.mesh.shape
        notes = about(self.program.config, self.sources, mesh, step)
        self.checkpoints.save(step, state, notes)

    def evaluate(self, step: int, state: TrainState, num_batches: int) -> Score:
        """Score the state and log it."""
        score = evaluate(self.program, best_params(state), self.sources, num_batches)
        values = {"eval/loss": score.loss, "eval/bits_per_byte": score.bits_per_byte}
        self.run.log(step, values)
        return score


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
    """
    interrupt = Interrupt()
    set_up(config.runtime)
    encoding = encoding_of(config.data)
    config = settle(config, padded_vocab_size(encoding), encoding.n_vocab)
    started = time.monotonic()
    jax.devices()
    ready = time.monotonic()
    program = make_program(config)  # before anything is written
    sources = open_sources(config.data)
    order = Order(sources, config.data, config.seed)
    if used_up := order.mistakes(config.train.num_steps):
        raise ConfigError([Mistake(*mistake) for mistake in used_up])
    with open_run(config, sources) as run:
        found = run.results()
        if found and found["step"] >= config.train.num_steps:
            print_results(found, command, config.schedule, run.path)
            return 0
        run.events.lap("start", until=started)
        run.events.lap("init", until=ready)
        if run.schedule_steps != config.train.num_steps:
            program = make_program(config, schedule_steps=run.schedule_steps)
        describe(program)
        describe_data(order, config.train.num_steps)
        checkpoints = Checkpoints(run.path / "checkpoints", config.checkpoint)
        start = Start(program, sources, order, run, checkpoints, interrupt)
        run.events.lap("prepare")
        with jax.set_mesh(program.mesh):
            code = _train(start)
        checkpoints.close()
        run.events.lap("save")
        run.events.end(code)
    found = run.results()
    if code == 0 and found:
        print_results(found, command, config.schedule, run.path)
    return code


def _train(start: Start) -> int:
    """Find the state, step to the end, leave the results."""
    program, run = start.program, start.run
    state = start.checkpoints.restore(program.state)
    step = 0 if state is None else int(state.step)
    run.events.lap("restore", step=step)
    state = state or program.init()
    run.start_at(step)
    print(f"run         {run.path}, from step {step:,}", flush=True)
    code, state = _loop(start, state)
    if code == 0:
        step, batches = int(state.step), program.config.eval.final_num_batches
        score = start.evaluate(step, state, batches)
        run.events.lap("eval")
        start.checkpoints.wait()  # results say that the run is finished
        run.events.lap("save")
        params = best_params(state)
        run.write_results(results(program, params, start.sources, step, score))
        run.events.lap("close")
    return code


def _loop(start: Start, state: TrainState) -> tuple[int, TrainState]:
    """Step until the end, a request to stop, or divergence."""
    program, run, config = start.program, start.run, start.program.config
    first, end = int(state.step), config.train.num_steps
    if first >= end:
        return 0, state
    train_step = program.train_step.lower(program.state, program.batch).compile()
    run.events.lap("compile")
    rows = local_rows(program.batch)
    feed = Feed(start.order.batches(first, rows), program.batch)
    window = Window(program, run, feed)
    profiler = Profiler(config.profile.steps, str(run.path / "profile"))
    await_steps = jax.default_backend() == "cpu"  # its devices deadlock otherwise
    with Progress(end, first, window.peak is not None) as progress:
        for step in range(first + 1, end + 1):
            profiler.before(step)
            state, metrics = train_step(state, next(feed))
            window.add(metrics)
            if await_steps:
                jax.block_until_ready(metrics)
            profiler.after(step, metrics)
            stop, last = start.interrupt.code(), step == end
            due = last or step % config.log.interval_steps == 0
            if due or stop:
                window.close(step, progress, write=due)
            if window.skipped_in_a_row > config.train.max_skipped_steps:
                log.error(
                    "step %d: the last %d updates were not finite and were left out; "
                    "lower the learning rate, or raise train.max_skipped_steps",
                    step,
                    window.skipped_in_a_row,
                )
                return DIVERGED, state
            if step % config.eval.interval_steps == 0 and not last:
                with window.pause("eval"):
                    start.evaluate(step, state, config.eval.num_batches)
            if last or stop or start.checkpoints.due(step):
                with window.pause("save"):
                    run.flush()
                    start.save(step, state)
            if stop and not last:
                progress.note(f"asked to stop: saved step {step:,}")
                return stop, state
    return 0, state
