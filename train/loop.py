"""A run from its start, or from where it was stopped, to its end.

The loop dispatches a step before it reads the metrics of the one before: the host waits
for the devices only to log, to evaluate and to save.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from data.batches import Order
from data.sources import Sources, encoding_of, open_sources
from data.tokenizer import padded_vocab_size
from train.checkpoint import Checkpoints
from train.cluster import Cluster, exit_code, join
from train.config import Config, ConfigError, Mistake
from train.describe import describe, describe_data
from train.evaluation import Score, evaluate
from train.exits import DIVERGED
from train.feed import Feed, local_rows
from train.preflight import about_data, about_devices, about_program
from train.program import Program, make_program, settle
from train.progress import Progress
from train.requests import SAVE, Crash, Requests
from train.rundir import RunDir, about, open_run, read_results
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
    requests: Requests

    def save(self, step: int, state: TrainState, last: bool) -> str | None:
        """Begin to save the state of `step`; say what came to nothing."""
        mesh = self.program.mesh.shape
        notes = about(self.program.config, self.sources, mesh, step)
        self.run.flush()
        return self.checkpoints.save(step, state, notes, last)

    def evaluate(self, step: int, state: TrainState, num_batches: int) -> Score:
        """Score the state and log it."""
        score = evaluate(self.program, best_params(state), self.sources, num_batches)
        values = {"eval/loss": score.loss, "eval/bits_per_byte": score.bits_per_byte}
        self.run.log(step, values)
        return score


class Prepared:
    """The program and the data of a config, once all processes can run it.

    config: settled.
    """

    config: Config
    program: Program
    sources: Sources

    def __init__(self, config: Config, cluster: Cluster):
        """Prepare both, before anything is written.

        Raises:
            ConfigError: if the config does not fit the devices or the data.
            DataError: if the data is missing or damaged.
            Exit: if the processes are not equal.
        """
        self.config = config
        cluster.together(self._settle)
        cluster.together(self._lay_out)

    def _settle(self) -> Mapping[str, str]:
        encoding = encoding_of(self.config.data)
        vocab = padded_vocab_size(encoding), encoding.n_vocab
        self.config = settle(self.config, *vocab)
        return about_program(self.config)

    def _lay_out(self) -> Mapping[str, str]:
        self.program = make_program(self.config)
        self.sources = open_sources(self.config.data)
        order = Order(self.sources, self.config.data, self.config.seed)
        if used_up := order.mistakes(self.config.train.num_steps):
            raise ConfigError([Mistake(*mistake) for mistake in used_up])
        return about_devices() | about_data(self.sources)


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
        cluster = join(config.distributed)
        requests.connect(cluster)
        set_up(config.runtime)
        prepared = Prepared(config, cluster)
        config = prepared.config
        with open_run(config, prepared.sources, cluster) as run:
            code = 0 if run.finished else _start(prepared, run, cluster, requests)
        if code == 0 and cluster.first:
            print_results(read_results(run.path), command, config.schedule)
        return code


def _start(
    prepared: Prepared, run: RunDir, cluster: Cluster, requests: Requests
) -> int:
    """Start, or go on."""
    config, program, sources = run.config, prepared.program, prepared.sources
    if run.schedule_steps != config.train.num_steps:
        program = make_program(config, schedule_steps=run.schedule_steps)
    order = Order(sources, config.data, config.seed)
    describe(program)
    describe_data(order, config.train.num_steps)
    checkpoints = Checkpoints(run.path / "checkpoints", config.checkpoint, cluster)
    start = Start(program, sources, order, run, checkpoints, requests)
    try:
        with jax.set_mesh(program.mesh):
            code = _train(start)
        checkpoints.close()
    except Exception as error:
        if not cluster.processes > 1:
            raise
        log.exception("process %d", cluster.process)
        said = f"{type(error).__name__}: {error}"
        requests.crashed(Crash(cluster.process, exit_code(error), -1, said))
    return code


def _train(start: Start) -> int:
    """Find the state, step to the end, leave the results."""
    program, run = start.program, start.run
    began = time.monotonic()
    state = start.checkpoints.restore(program.state, at_most=run.rewind_to)
    state = state or program.init()
    step = int(state.step)
    run.events.record("restore", time.monotonic() - began, step=step)
    if run.rewind_to is not None:
        run.rewound()
    run.start_at(step)
    print(f"run         {run.path}, from step {step:,}", flush=True)
    code, state = _loop(start, state)
    if code == 0:
        start.checkpoints.wait()  # results say that the run is finished
        start.requests.finished()
        with run.events.span("eval"):
            step, batches = int(state.step), program.config.eval.final_num_batches
            score = start.evaluate(step, state, batches)
            params = best_params(state)
            run.write_results(results(program, params, start.sources, step, score))
    return code


def _loop(start: Start, state: TrainState) -> tuple[int, TrainState]:
    """Step until the end, a request to stop, or divergence."""
    program, run, config = start.program, start.run, start.program.config
    requests, checkpoints = start.requests, start.checkpoints
    first, end = int(state.step), config.train.num_steps
    if first >= end:
        return 0, state
    with run.events.span("compile"):
        train_step = program.train_step.lower(program.state, program.batch).compile()
    rows = local_rows(program.batch)
    feed = Feed(start.order.batches(first, rows), program.batch)
    window = Window(program, run, start.order, feed)
    profiler = Profiler(config.profile.steps, str(run.path / "profile"))
    await_steps = jax.default_backend() == "cpu"  # its devices deadlock otherwise
    requests.passed(first)
    with Progress(end, first, window.peak is not None, run.write) as progress:
        for step in range(first + 1, end + 1):
            profiler.before(step)
            state, metrics = train_step(state, next(feed))
            window.add(metrics)
            if await_steps:
                jax.block_until_ready(metrics)
            profiler.after(step, metrics)
            request, last = requests.passed(step), step == end
            stop = None if request == SAVE or last else request
            due = last or step % config.log.interval_steps == 0
            if due or stop:
                window.close(step, progress, write=due)
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
                with window.pause("eval"):
                    start.evaluate(step, state, config.eval.num_batches)
            if last or stop or request == SAVE or checkpoints.due(step):
                with window.pause("save"):
                    failure = start.save(step, state, last=last or bool(stop))
                if failure:
                    progress.note(failure)
            elif run.write and checkpoints.overdue():
                requests.ask(SAVE)
            if stop:
                progress.note(f"asked to stop: saved step {step:,}")
                return int(stop), state
    return 0, state
