"""Drills of being told to stop."""

import signal
import time

from tests.drills.drill import drill, expect
from tests.drills.ground import Ground
from tests.drills.run import Run
from tests.fleet import Fleet

_NEVER = "train.num_steps=100000"


def after_steps(run: Run, fleet: Fleet, more: int = 3) -> None:
    """Wait until a start has done some steps."""
    fleet.await_text("from step")
    first = run.step
    fleet.await_that(lambda: run.step >= first + more)


def stopped(run: Run, fleet: Fleet, number: int, process: int = 0) -> int:
    """Send a signal, and check what stopping means; give the step that was saved."""
    began = time.monotonic()
    fleet.send(number, process)
    expect("exit codes", fleet.wait(60), [42] * len(fleet))
    took = time.monotonic() - began
    assert took < 15, f"it took {took:.1f} s"
    step = run.step
    expect("the newest sealed step", run.sealed()[-1], step)
    expect("leftovers", run.leftovers(), [])
    return step


def goes_on(run: Run, step: int, count: int = 1) -> None:
    """Check that the next start goes on from a step to the end."""
    fleet = run.finish(count=count)
    assert f"from step {step}\n" in fleet.said(), fleet.said()[-2000:]


@drill(4, fast=True)
def sigterm_to_one_process(ground: Ground) -> str:
    """SIGTERM between two steps -> that step saved and sealed, exit 42 within 15 s; the
    next start goes on from it to the bits of an undisturbed run."""
    run = ground.run()
    fleet = run.start()
    after_steps(run, fleet)
    step = stopped(run, fleet, signal.SIGTERM)
    goes_on(run, step)
    ground.check(run)
    return f"42, step {step} saved, bits equal"


@drill(5)
def sigterm_to_one_of_two(ground: Ground) -> str:
    """SIGTERM to process 1, then, in the next start, to process 0 of two -> both end
    after the same saved step with 42; the third start ends with the same bits."""
    run = ground.run()
    steps = []
    for process in (1, 0):
        fleet = run.start(count=2)
        after_steps(run, fleet)
        steps.append(stopped(run, fleet, signal.SIGTERM, process))
    goes_on(run, steps[-1], count=2)
    ground.check(run, count=2)
    return f"42 and 42 twice, steps {steps} saved, bits equal"
