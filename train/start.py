"""One start of a run: join, prepare, open, restore, train, leave results, close.

A run looks for its state in this order: the newest checkpoint that verifies, an older
one, a fresh state if there never was a checkpoint.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import jax
from etils import epath

from data.batches import Order, batch_number
from data.encoding import padded_vocab_size
from data.errors import DataError
from data.sources import encoding_of
from train.config import Config
from train.describe import describe, describe_data
from train.distributed.preemption import Crash, Preemption
from train.distributed.processes import Cluster, join
from train.distributed.watchdog import Watchdog
from train.errors import CRASHES_AGAIN, ConfigError, Exit, Mistake, exit_code
from train.evaluate.results import print_results, results
from train.evaluate.validation import as_metrics
from train.identity import run_dir
from train.loop import Trainer
from train.masking import mask
from train.preflight import Prepared
from train.program import Program, make_program, settle
from train.run.checkpoint import Checkpoints
from train.run.directory import RunDir, open_run
from train.run.starts import read_results
from train.run.storage import run_folder
from train.runtime import set_up
from train.state import TrainState, best_params

log = logging.getLogger(__name__)


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
    with closing(Preemption()) as preemption:
        cluster = join(config.distributed, preemption.hold)
        preemption.connect(cluster)
        set_up(config.runtime)
        folder = run_folder(settled_run_dir(config))
        place = cluster.process, cluster.processes
        with closing(Watchdog(config.watchdog, folder, *place)) as watchdog:
            prepared = Prepared(config, cluster, watchdog.beat)
            config, sources = prepared.config, prepared.sources
            _check_weights(prepared, folder, cluster)
            with open_run(config, sources, cluster, preemption) as run:
                code = 0
                if not run.continuation.finished:
                    code = _start(prepared, run, cluster, preemption, watchdog)
        if code == 0 and cluster.is_leader:
            print_results(read_results(run.path), command, config, run.path)
        return code


def settled_run_dir(config: Config) -> str:
    """Return the run's directory: its default name depends on the vocabulary too.

    Where there is no vocabulary to be had the start will soon say why.
    """
    try:
        encoding = encoding_of(config.data)
    except (ConfigError, DataError):
        return run_dir(config)
    return run_dir(settle(config, padded_vocab_size(encoding)))


def _start(
    prepared: Prepared,
    run: RunDir,
    cluster: Cluster,
    preemption: Preemption,
    watchdog: Watchdog,
) -> int:
    """Start, or go on; end all processes together if this one fails."""
    devices_asked, devices_found = prepared.devices_s
    run.events.lap("start", until=devices_asked)
    run.events.lap("init", until=devices_found)
    config, program, sources = run.config, prepared.program, prepared.sources
    schedule_steps = run.continuation.schedule_steps
    try:
        if schedule_steps != config.train.num_steps:
            program = make_program(
                config, schedule_steps=schedule_steps, num_tokens=program.num_tokens
            )
        compiling = _compile(program)
        order = Order(sources, config.data, config.seed)
        describe(program)
        describe_data(order, config.train.num_steps)
        checkpoints = Checkpoints(
            run.path / "checkpoints",
            config.checkpoint,
            cluster,
            run.ready_to_save,
            run.continuation.run_id,
        )
        ends = cluster, preemption, watchdog
        given = program, compiling, sources, order, run, checkpoints
        trainer = Trainer(*given, *ends, prepared.tasks)
        run.events.lap("prepare")
        try:
            with jax.set_mesh(program.mesh):
                code = _train(trainer)
        except Exception:
            if cluster.processes == 1:  # several end each other at once
                with watchdog.during("save"):
                    checkpoints.finish(config.watchdog.save_timeout_s / 2)
            raise
        with trainer.phase("save"):
            checkpoints.close()
    except Exception as error:
        _crashed(error, run, cluster, preemption)
        raise
    run.events.end(code)
    return code


def _compile(program: Program) -> Future[list[Any]]:
    """Begin to compile the train step, and the watched one, beside the start's rest.

    XLA needs neither the state nor the interpreter's lock, and takes longest of all.
    """

    steps = [program.train_step]
    if program.config.log.numerics_interval_steps is not None:
        steps.append(program.watched_step)

    def compile_steps() -> list[Any]:
        with jax.set_mesh(program.mesh):  # of this thread
            arguments = program.state, program.batch
            return [step.lower(*arguments).compile() for step in steps]

    thread = ThreadPoolExecutor(1, "compile")
    compiling = thread.submit(compile_steps)
    thread.shutdown(wait=False)
    return compiling


def _train(trainer: Trainer) -> int:
    """Restore or initialise the state, step to the end, write the results."""
    program, run, sources = trainer.program, trainer.run, trainer.sources
    rewind_to = run.continuation.rewind_to
    trainer.watchdog.phase("restore")
    if rewind_to is not None:  # before later steps are set aside
        steps = trainer.checkpoints.saved.steps()
        _check_skips(trainer, max((s for s in steps if s <= rewind_to), default=0))
    state = trainer.checkpoints.saved.restore(
        program.state, at_most=rewind_to, repack=program.optimizer.storage.convert
    )
    step = 0 if state is None else int(state.step)
    run.events.lap("restore", step=step)
    _check_skips(trainer, step)
    if rewind_to is not None:
        run.rewound()
    with trainer.phase("compile", "prepare"):
        state = state or _first_state(trainer)
        run.start_at(step, sources)
    print(mask(f"run         {run.path}, from step {step:,}"), flush=True)
    code, state = trainer.train(state)
    if code:
        return code
    with trainer.phase("save"):
        trainer.checkpoints.wait()  # results say that the run is finished
    trainer.preemption.training_done()
    with trainer.phase("eval"):
        step, batches = int(state.step), program.config.eval.final_num_batches
        scores, judged = trainer.evaluate(state, batches), trainer.judge(state)
        run.log(step, as_metrics(scores) | judged)
    with trainer.phase("eval", "close"):
        params = best_params(state)
        found = results(program, params, sources, step, scores)
        run.write_results(found | judged)
    return 0


def _first_state(trainer: Trainer) -> TrainState:
    """Return the state of step 0: as drawn, or with weights that are there."""
    program = trainer.program
    path = program.config.init_from
    if path is None:
        return program.init()
    from train.pretrained.begin import hold_to_first, start_from  # few runs need it

    print(mask(f"weights     {path}"), flush=True)
    hold_to_first(path, trainer.run.path, trainer.cluster)
    return start_from(path, program)


def _check_weights(prepared: Prepared, folder: epath.Path, cluster: Cluster) -> None:
    """Check weights that are there before a run begins with them.

    Raises:
        ConfigError: with all in which it differs from the model.
        DataError: if it is damaged.
        Exit: if it is not the same for all processes.
    """
    path = prepared.config.init_from
    if path is not None and not (folder / "config.yaml").exists():
        from train.pretrained.begin import check_weights

        cluster.agree(lambda: check_weights(path, prepared.program))


def _check_skips(trainer: Trainer, step: int) -> None:
    """Refuse to leave out what was trained on before the step to go on from.

    Raises:
        ConfigError: naming how to.
    """
    before = trainer.run.continuation.known_skips
    left_out = trainer.run.config.data.skip_batches
    now = trainer.order.batch_number
    if step and now(step - 1) != batch_number(step - 1, before):
        rule = (
            f"leave out batches that the {step} steps so far were trained on; add "
            f"run.rewind_to=<a step before them>"
        )
        raise ConfigError([Mistake("data.skip_batches", left_out, rule)])


def _crashed(
    error: Exception, run: RunDir, cluster: Cluster, preemption: Preemption
) -> None:
    """End the other processes too; raise if another start would be of no use."""
    message = f"{type(error).__name__}: {error}"
    known = isinstance(error, Exit | ConfigError | DataError)
    place = cluster.process, exit_code(error), preemption.step
    crash = Crash(*place, message[:1000], known)
    if cluster.processes > 1:
        # Without words of its own process 0 says it.
        if not preemption.leaving and (str(error) or not known):
            log.error("%s", message, exc_info=None if known else error)
        preemption.crashed(crash)
    if run.judge_crash(crash) == CRASHES_AGAIN:
        log.error("", exc_info=error)
        when, batch = "before its first step", ""
        if crash.step >= 0:
            when = f"after step {crash.step}"
            batch = f". The batch it was at: python -m data.inspect run.dir={run.path} "
            batch += f"step={crash.step}"
        raise Exit(
            CRASHES_AGAIN,
            f"crashed {when} for the third time, always with this code: another start "
            f"would do the same{batch}",
        ) from None
