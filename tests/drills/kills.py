"""Twenty faults hit a run at random moments; exit codes decide on the restarts."""

import random
import signal
import time
from collections import Counter

from tests.drills.drill import drill
from tests.drills.ground import Ground, check_equal
from tests.drills.run import Run
from tests.fleet import Fleet

KILLS = 20
STEPS = 240
SEED = 7
# A launcher restarts a run that ends with these codes: preempted, owned, aborted, and
# the codes of the signals.
RESTARTED = {42, 75, 134, 137, 143}


@drill("kills")
def killed_twenty_times(ground: Ground) -> str:
    """One or both of two processes get SIGKILL, SIGTERM or SIGSTOP, twenty times at
    random moments. A loop restarts them as long as the exit codes say so -> each step
    has one line, losses and arrays have the bits of an undisturbed run, and each start
    continues from the newest sealed step."""
    steps = f"train.num_steps={STEPS}"
    undisturbed = ground.run(steps, name="undisturbed")
    undisturbed.finish(count=2)
    run = ground.run(steps)
    chance = random.Random(SEED)
    ground.traceback = True  # a process whose peer is killed prints one
    kinds = Counter[str]()
    moments = []
    while not run.results:
        sealed = run.sealed()
        fleet = run.start(count=2)
        if sum(kinds.values()) < KILLS:
            kind, moment = _disturb(fleet, run, chance)
            kinds[kind] += 1
            moments.append(moment)
        codes = fleet.wait(180)
        assert {*codes} <= RESTARTED | {0}, f"codes {codes} after {moments[-1]}"
        if sealed and "from step" in fleet.said():
            assert f"from step {sealed[-1]:,}" in fleet.said(), fleet.said()[-2000:]
    assert sum(kinds.values()) == KILLS, f"finished after {kinds}"
    check_equal(run, undisturbed, STEPS)
    faults = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{faults}; bits equal. At: {', '.join(moments)}"


def _disturb(fleet: Fleet, run: Run, chance: random.Random) -> tuple[str, str]:
    """Wait for a random moment, send a signal, and return the fault and the moment."""
    began = time.monotonic()
    first = run.step
    if chance.random() < 0.3:
        time.sleep(chance.uniform(0, 12))  # hits start, compilation or restore
    else:
        target = first + chance.randint(1, 12)
        fleet.await_that(lambda: run.step >= target or run.results)
        time.sleep(chance.uniform(0, 0.3))
    moment = f"{time.monotonic() - began:.1f} s, step {run.step}"
    receivers = chance.choice([(0,), (1,), (0, 1)])
    kind = chance.choice(["SIGKILL", "SIGTERM", "SIGSTOP"])
    if kind != "SIGSTOP":
        fleet.send(getattr(signal, kind), receivers)
        return f"{kind} to {len(receivers)}", moment
    fleet.send(signal.SIGSTOP, receivers)
    if len(receivers) == 1:  # the other process gives up after its heartbeat
        fleet.processes[1 - receivers[0]].wait(120)
    else:
        time.sleep(chance.uniform(1, 14))  # some pauses are shorter than the heartbeat
    fleet.send(signal.SIGCONT, receivers)
    if len(receivers) == 2:
        time.sleep(1)
        fleet.send(signal.SIGKILL, receivers)
    return f"SIGSTOP to {len(receivers)}", moment
