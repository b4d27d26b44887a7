"""One start of a run: join the cluster, prepare, find the state, train, write results.

A start takes its state from the first of these (`_find_state`):

1. the newest checkpoint that verifies, up to `run.rewind_to` if that is set;
2. the next older checkpoint; bad ones are moved to `checkpoints/quarantine/`;
3. the weights that `init_from` names;
4. a fresh initialisation.

3 and 4 apply only if the run has never had a checkpoint. If none verifies, or if all
are gone although a record of the run shows that there was one, the start fails with
DataError.
"""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from data.batches import Order, batch_number
from data.errors import DataError, Mistake
from data.sources import Sources
from train.catalog import START_PARTS
from train.config import Config
from train.core.loop import Trainer
from train.core.phases import PhaseSteps
from train.core.state import TrainState, best_params
from train.distributed.peers import Peers
from train.distributed.preemption import Crash, Preemption
from train.distributed.processes import Cluster
from train.distributed.watchdog import Watchdog
from train.errors import CRASHES_AGAIN, ConfigError, Exit, exit_code
from train.evaluate.evaluator import Evaluator
from train.evaluate.validation import as_metrics
from train.hardware.chips import peak_flops
from train.identity import run_dir
from train.preflight import Prepared, settled_run_dir
from train.resolve.phases import phase_programs
from train.resolve.program import ConfiguredProgram, make_program
from train.run.checkpoint import Checkpoints
from train.run.directory import RunDir, open_run
from train.run.folder import run_folder
from train.run.starts import document_start_of, read_results
from train.run.this_start import Begin, ThisStart
from train.run.validations import PART
from train.runtime import set_up

log = logging.getLogger(__name__)


def start_run(config: Config, command: str, begin: Begin | None = None) -> int:
    """Start a run, or continue the run of the same name.

    `command` is the command line. The printed results show it with the overrides that
    continue training. `begin` copies the checkpoint that a branch continues.

    Returns:
        The exit code: 0 finished, 42 preempted, 130 stopped by a person, 3 diverged.

    Raises:
        ConfigError: if the config does not fit the devices, the data or the run.
        DataError: if the data or every checkpoint is damaged.
        Exit: if the run ends for another known reason.
    """
    with closing(Preemption()) as preemption:
        cluster = START_PARTS.join(config.distributed, run_dir(config), preemption.hold)
        preemption.connect(cluster)
        set_up(config.runtime)
        folder = run_folder(settled_run_dir(config))
        watchdog = Watchdog(config.watchdog, folder, cluster.process, cluster.processes)
        with closing(watchdog):
            value = cluster.broadcast(lambda: document_start_of(folder, config.data))
            data = replace(config.data, document_start=value)
            prepared = Prepared(
                replace(config, data=data), cluster, START_PARTS, watchdog.beat
            )
            config = prepared.config
            if begin is None:
                prepared.check_initial_weights(folder)
            if config.runtime.prove_kernels:
                execution = prepared.program.execution
                cluster.agree(
                    lambda: START_PARTS.check_kernels(
                        config.model, config.data, execution
                    )
                )
            start = ThisStart(run_folder(run_dir(config)), config, prepared.sources)
            with open_run(start, cluster, preemption, begin, watchdog.beat) as run:
                finished = run.continuation.finished
                code = 0 if finished else _start(prepared, run, preemption, watchdog)
        if code == 0 and cluster.is_leader:
            START_PARTS.print_results(
                read_results(run.path), command, run.path, config.schedule, config.run
            )
        return code


def _start(
    prepared: Prepared, run: RunDir, preemption: Preemption, watchdog: Watchdog
) -> int:
    """Train in an open run; end all processes together if this one fails."""
    cluster = prepared.cluster
    devices_asked_s, devices_found_s = prepared.devices_s
    run.events.lap("start", until=devices_asked_s)
    run.events.lap("init", until=devices_found_s)
    try:
        start = _prepare_start(prepared, run, preemption, watchdog)
        run.events.lap("prepare")
        try:
            code = _train(start)
        except Exception:
            if cluster.processes == 1:  # Several processes exit without waiting.
                with watchdog.during("save"):
                    limit_s = run.config.watchdog.save_timeout_s / 2
                    start.checkpoints.finish(limit_s)
            raise
        with start.phase("save"):
            start.checkpoints.close()
    except Exception as error:
        report_crash(error, run, cluster, preemption)
        raise
    run.events.end(code)
    return code


@dataclass(frozen=True)
class _PreparedStart:
    """The program, the data and the services of one start."""

    program: ConfiguredProgram
    sources: Sources
    order: Order
    run: RunDir
    cluster: Cluster
    preemption: Preemption
    watchdog: Watchdog
    checkpoints: Checkpoints
    evaluator: Evaluator
    phases: PhaseSteps

    @contextmanager
    def phase(self, name: str, event: str | None = None) -> Iterator[None]:
        """Set the watchdog's phase for a block, and record the block's duration."""
        self.watchdog.phase(name)
        yield
        self.run.events.lap(event or name)

    def make_trainer(self) -> Trainer:
        """Return the training loop with its services."""
        config = self.run.config
        program = self.program
        peak = peak_flops(program.mesh.devices.flat[0].device_kind)
        return Trainer(
            config=config,
            program=program,
            phases=self.phases,
            batches=self.order,
            saves=self.checkpoints,
            metadata=self.run.this_start.checkpoint_metadata(
                program.mesh.shape,
                self.run.continuation.schedule_steps,
                self.run.branch,
            ),
            journal=self.run,
            peers=Peers(
                program,
                self.cluster,
                self.preemption,
                config.watchdog.compile_timeout_s,
                allow_faults=config.runtime.allow_fault_injection,
            ),
            watch=self.watchdog,
            scorer=self.evaluator,
            open_profiler=partial(
                START_PARTS.open_profiler, self.run, self.cluster, self.preemption
            ),
            peak_flops=None if peak is None else peak * program.mesh.size,
        )


def _prepare_start(
    prepared: Prepared, run: RunDir, preemption: Preemption, watchdog: Watchdog
) -> _PreparedStart:
    """Begin to compile, describe the program, and return the parts of the start."""
    config = run.config
    program = prepared.program
    schedule_steps = run.continuation.schedule_steps
    make = partial(
        make_program, schedule_steps=schedule_steps, num_tokens=program.num_tokens
    )
    if schedule_steps != config.train.num_steps:
        program = make(config)
    order = Order(prepared.sources, config.data, config.seed)
    last_batch = order.batch_number(config.train.num_steps - 1)
    is_watched = config.log.numerics_interval_steps is not None
    phases = PhaseSteps(
        phase_programs(program, make), last_batch, is_watched=is_watched
    )
    checkpoints = Checkpoints(
        run.path / "checkpoints",
        config.checkpoint,
        prepared.cluster,
        before_save=run.prepare_save,
        run_id=run.continuation.run_id,
        on_sealed=run.record_save,
    )
    # The state is most likely that of the newest checkpoint.
    phases.begin(order.batch_number(max(checkpoints.saved.steps(), default=0)))
    START_PARTS.describe_program(program)
    START_PARTS.describe_data(order, config.train.num_steps)
    return _PreparedStart(
        program=program,
        sources=prepared.sources,
        order=order,
        run=run,
        cluster=prepared.cluster,
        preemption=preemption,
        watchdog=watchdog,
        checkpoints=checkpoints,
        evaluator=Evaluator(
            program,
            prepared.sources,
            prepared.tasks,
            earlier=lambda: run.validations,
            heartbeat=watchdog.beat,
        ),
        phases=phases,
    )


def _train(start: _PreparedStart) -> int:
    """Find the state, train to the end, write the results; return the exit code."""
    program = start.program
    run = start.run
    state = _find_state(start)
    print(f"run         {run.path}, from step {int(state.step):,}", flush=True)
    is_trained = int(state.step) < program.config.train.num_steps
    code, state = start.make_trainer().train(state)
    if code:
        return code
    with start.phase("save"):
        start.checkpoints.wait()  # Finish the save before results mark the run done.
    start.preemption.training_done()
    with start.phase("eval"):
        step = int(state.step)
        params = best_params(state)
        if not is_trained:  # The loop has not scored the rows that all steps score.
            run.log(step, start.evaluator.validate(step, params).metrics)
        evaluations = start.evaluator.score_at_end(params, announce=run.write)
        task_scores = start.evaluator.score_tasks(params)
        for prefix, scores in evaluations.items():
            if prefix != PART:
                run.log(step, as_metrics(scores, prefix))
        if task_scores:
            run.log(step, task_scores)
    with start.phase("eval", "close"):
        values = START_PARTS.compute_results(
            program, params, start.sources, step, evaluations
        )
        run.write_results(values | task_scores)
    return 0


def _find_state(start: _PreparedStart) -> TrainState:
    """Return the first state that exists in the list of the module's docstring."""
    program = start.program
    run = start.run
    saved = start.checkpoints.saved
    rewind_to = run.continuation.rewind_to
    start.watchdog.phase("restore")
    if rewind_to is not None:  # Check before the restore moves later steps aside.
        newest_step = max((s for s in saved.steps() if s <= rewind_to), default=0)
        _check_skips(start, newest_step)

    # 1 and 2: the newest checkpoint that verifies.
    state = saved.restore(
        program.state, at_most=rewind_to, repack=program.optimizer.storage.convert
    )
    if state is None:
        run.check_lost()
    step = 0 if state is None else int(state.step)
    run.events.lap("restore", step=step)
    _check_skips(start, step)
    if rewind_to is not None:
        run.record_rewind()

    with start.phase("compile", "prepare"):
        if state is None:
            # 3: the weights of init_from. 4: a fresh initialisation.
            init_from = program.config.init_from
            state = _start_from(init_from, start) if init_from else program.init()
        run.start_at(step)
    return state


def _start_from(init_from: str, start: _PreparedStart) -> TrainState:
    """Return the state of step 0 with the weights of `init_from`."""
    weights = START_PARTS.initial_weights()
    print(f"weights     {init_from}", flush=True)
    weights.record_or_check_files(init_from, start.run.path, start.cluster)
    return weights.start_from(init_from, start.program)


def _check_skips(start: _PreparedStart, step: int) -> None:
    """Raise ConfigError if one of the first `step` steps used a batch to be skipped."""
    earlier_skips = start.run.continuation.earlier_skips
    skip_batches = start.run.config.data.skip_batches
    index = step - 1  # the index of the last step
    if step and start.order.batch_number(index) != batch_number(index, earlier_skips):
        rule = (
            f"leave out batches that the {step} steps so far were trained on; add "
            f"run.rewind_to=<a step before them>"
        )
        raise ConfigError([Mistake("data.skip_batches", skip_batches, rule)])


def report_crash(
    error: Exception, run: RunDir, cluster: Cluster, preemption: Preemption
) -> None:
    """Report the crash of this process, so that the other processes end too.

    Raises:
        Exit: if another start would crash the same way.
    """
    message = f"{type(error).__name__}: {error}"
    has_message = isinstance(error, Exit | ConfigError | DataError)
    crash = Crash(
        process=cluster.process,
        code=exit_code(error),
        step=preemption.step,
        error=message[:1000],
        known=has_message,
    )
    if cluster.processes > 1:
        # An Exit without a message follows from an error that process 0 reports.
        if not preemption.leaving and (str(error) or not has_message):
            log.error("%s", message, exc_info=None if has_message else error)
        preemption.crashed(crash)
    if run.judge_crash(crash) == CRASHES_AGAIN:
        log.error("", exc_info=error)
        when = "before its first step"
        remedy = ""
        if crash.step >= 0:
            when = f"after step {crash.step}"
            remedy = ". To see the batch that it was trained on, run python -m "
            remedy += f"data.inspect run.dir={run.path} step={crash.step}"
        text = f"crashed {when} for the third time, always with this code: another "
        raise Exit(CRASHES_AGAIN, f"{text}start would crash too{remedy}") from None
