"""Drills of runs that are told to stop."""

import contextlib
import signal
import subprocess
import time
from typing import Any

from tests.drills.drill import drill, expect
from tests.drills.ground import HALF, SLOWER, Ground
from tests.drills.run import Run
from tests.fleet import Fleet
from train.run.metrics import read_metrics


def after_steps(run: Run, fleet: Fleet, more: int = 3) -> None:
    """Wait until a start has completed `more` steps."""
    fleet.await_text("from step")
    first = run.step
    fleet.await_that(lambda: run.step >= first + more)


def stopped(run: Run, fleet: Fleet, number: int, process: int = 0) -> int:
    """Send a signal, check that the run stops as promised, and return its step."""
    began = time.monotonic()
    fleet.send(number, [process])
    expect("exit codes", fleet.wait(), [42] * len(fleet))
    took = time.monotonic() - began
    assert took < 15 * SLOWER, f"it took {took:.1f} s"
    step = run.step
    expect("the newest sealed step", run.sealed()[-1], step)
    expect("leftovers", run.leftovers(), [])
    return step


def goes_on(run: Run, step: int, *more: str, **options: Any) -> None:
    """Check that the next start continues from a step, and ends with 0."""
    fleet = run.finish(*more, **options)
    assert f"from step {step}\n" in fleet.said(), fleet.said()[-2000:]


@drill(4)
def sigterm_to_one_process(ground: Ground) -> str:
    """SIGTERM arrives between two steps -> the step is saved and sealed, and the exit
    code is 42 within 15 s; the next start continues from it and ends with the bits of
    an undisturbed run."""
    run = ground.run()
    fleet = run.start()
    after_steps(run, fleet)
    step = stopped(run, fleet, signal.SIGTERM)
    goes_on(run, step)
    ground.check(run)
    return f"42, step {step} saved, bits equal"


@drill(5)
def sigterm_to_one_of_two(ground: Ground) -> str:
    """SIGTERM goes to process 1 of two and, in the next start, to process 0 -> both
    processes end with 42 after the same saved step; the third start ends with the same
    bits."""
    run = ground.run()
    steps = []
    for process in (1, 0):
        fleet = run.start(count=2)
        after_steps(run, fleet)
        steps.append(stopped(run, fleet, signal.SIGTERM, process))
    goes_on(run, steps[-1], count=2)
    ground.check(run, count=2)
    return f"42 and 42 twice, steps {steps} saved, bits equal"


@drill(6)
def sigterm_in_every_phase(ground: Ground) -> str:
    """SIGTERM arrives during a save, a restore, a compilation and an evaluation, a few
    times each -> the exit code is 42; the last saved step is the newest one and is
    sealed; there are no leftovers; the last start ends with the same bits."""
    run = ground.run(*("checkpoint.save_interval_steps=2", "eval.interval_steps=1"))
    hits: dict[str, int] = {}
    for phase, delay_s in (
        *(("save", delay_s) for delay_s in (0.0, 0.05, 0.1)),
        *(("restore", delay_s) for delay_s in (0.0, 0.02, 0.04, 0.06)),
        *(("compile", delay_s) for delay_s in (0.0, 0.2, 0.5)),
        *(("eval", delay_s) for delay_s in (0.0, 0.05, 0.1)),
    ):
        more = ()
        cache = {}
        if phase == "compile":  # the cache is empty, and two steps take longer
            more = ("log.numerics_interval_steps=1000",)
            cache = {"JAX_COMPILATION_CACHE_DIR": f"{ground.place}/{delay_s}"}
        fleet = run.start(*more, environment=cache)
        _await_phase(run, fleet, phase)
        time.sleep(delay_s)
        moment = time.time()
        fleet.send(signal.SIGTERM)
        expect(f"exit code in {phase}", fleet.wait(), [42])
        actual_phase = "save" if phase == "save" else run.phase_at(moment)
        hits[actual_phase] = hits.get(actual_phase, 0) + 1
        expect(f"sealed after {phase}", run.sealed()[-1:], [run.step][: run.step])
        expect(f"leftovers after {phase}", run.leftovers(), [])
    goes_on(run, run.step)
    ground.check(run)
    missed = {"compile", "restore", "eval", "save"} - hits.keys()
    assert not missed, f"no signal came in {missed}: {hits}"
    return f"42 each time; signals by phase: {hits}; bits equal"


def _await_phase(run: Run, fleet: Fleet, phase: str) -> None:
    if phase == "restore":
        starts = len(run.events("prepare"))
        fleet.await_that(lambda: len(run.events("prepare")) > starts)
        return
    fleet.await_text("from step")
    if phase == "eval":
        after_steps(run, fleet, 1)  # the first evaluation is long: it compiles
    if phase == "save":
        fleet.await_that(lambda: any("tmp" in name for name in run.leftovers()))


@drill(7)
def sigterm_twice_then_sigkill(ground: Ground) -> str:
    """SIGTERM arrives twice, and SIGKILL 50 ms to 15 s later, before or after
    everything is saved -> a later start continues from a sealed step that is no older
    than the newest one before SIGKILL, and ends with the same bits."""
    run = ground.run()
    reports = []
    for patience_s in (0.05, 0.2, 0.4, 0.8, 15 * SLOWER):
        fleet = run.start()
        after_steps(run, fleet, 2)
        fleet.send(signal.SIGTERM)
        fleet.send(signal.SIGTERM)
        process = fleet.processes[0]
        newest = run.sealed()[-1:]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        fleet.send(signal.SIGKILL)
        (code,) = fleet.wait()
        assert code == 42 or (code == 137 and patience_s < 1), f"exit code {code}"
        assert run.sealed()[-1:] >= newest, f"sealed {run.sealed()}, before {newest}"
        reports.append(f"{code} after {patience_s:g} s, step {run.sealed()[-1:]}")
    goes_on(run, run.sealed()[-1])
    ground.check(run)
    return f"{'; '.join(reports)}; bits equal"


@drill(8)
def signals_of_a_scheduler(ground: Ground) -> str:
    """SIGUSR1 arrives, and SIGUSR2 in the next start -> both act like SIGTERM: the step
    is saved and sealed, and the exit code is 42."""
    run = ground.run()
    steps = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        fleet = run.start()
        after_steps(run, fleet)
        steps.append(stopped(run, fleet, number))
    goes_on(run, steps[-1])
    ground.check(run)
    return f"42 and 42, steps {steps} saved, bits equal"


@drill(6)
def sigterm_while_two_processes_end(ground: Ground) -> str:
    """SIGTERM goes to process 1 of two that evaluate a finished run, before the results
    exist or 0 to 0.4 s after -> both processes end within 15 s, with 42 before the
    results and with 0 or 42 after them; the next start ends with 0."""
    reports = []
    for number, delay_s in enumerate((None, 0, 0.03, 0.1, 0.4)):
        run = ground.half(2, name=f"run-{number}")
        (run.path / "results.json").unlink()
        fleet = run.start(f"train.num_steps={HALF}", count=2)
        fleet.await_text("from step")
        if delay_s is not None:
            fleet.await_that(lambda run=run: run.results)
            time.sleep(delay_s)
        began = time.monotonic()
        fleet.send(signal.SIGTERM, [1])
        codes = fleet.wait()
        took = time.monotonic() - began
        allowed = [42] if delay_s is None else [0, 42]
        assert {*codes} <= {*allowed}, f"{delay_s}: exit codes {codes}"
        assert took < 15 * SLOWER, f"{delay_s}: it took {took:.1f} s"
        run.finish(f"train.num_steps={HALF}", count=2)
        scores = [row for row in read_metrics(run.path) if "eval/loss" in row]
        assert len(scores) == 1, f"{delay_s}: the last step's score: {scores}"
        reports.append(f"{codes} after {took:.1f} s")
    return "; ".join(reports)


@drill(41)
def notices_that_keep_coming(ground: Ground) -> str:
    """SIGTERM and SIGUSR1 go in turn to both of two processes, a hundred times a second
    until they are gone -> both end with 42, and one step is saved; the next start ends
    with the same bits."""
    run = ground.run()
    fleet = run.start(count=2)
    sent = 0
    after_steps(run, fleet)
    while any(process.poll() is None for process in fleet.processes):
        fleet.send((signal.SIGTERM, signal.SIGUSR1)[sent % 2])
        sent += 1
        assert sent < 18_000, "they do not end"
        time.sleep(0.01)
    expect("exit codes", fleet.wait(), [42, 42])
    step = run.step
    expect("the newest sealed step", run.sealed()[-1], step)
    goes_on(run, step, count=2)
    ground.check(run, count=2)
    return f"42 and 42 after {sent} notices, step {step} saved, bits equal"
