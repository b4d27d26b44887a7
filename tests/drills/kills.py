"""Twenty faults at random moments, and starts again by the exit codes alone."""

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
# What a launcher starts again: preempted, owned, aborted; and the signals' own codes.
AGAIN = {42, 75, 134, 137, 143}


@drill("kills")
def killed_twenty_times(ground: Ground) -> str:
    """Two processes; twenty times, at random moments, SIGKILL, SIGTERM or SIGSTOP to
    one or both; a loop starts them again as long as the exit codes say so -> all steps
    are there once, losses and arrays have the bits of an undisturbed run, and each
    start goes on from the newest sealed step."""
    steps = f"train.num_steps={STEPS}"
    straight = ground.run(steps, name="undisturbed")
    straight.finish(count=2)
    run = ground.run(steps)
    chance = random.Random(SEED)
    ground.traceback = True  # of processes whose peer was killed
    kinds = Counter[str]()
    seen = []
    while not run.results:
        sealed = run.sealed()
        fleet = run.start(count=2)
        if sum(kinds.values()) < KILLS:
            kind, moment = _disturb(fleet, run, chance)
            kinds[kind] += 1
            seen.append(moment)
        codes = fleet.wait(180)
        assert {*codes} <= AGAIN | {0}, f"codes {codes} after {seen[-1]}"
        if sealed and "from step" in fleet.said():
            assert f"from step {sealed[-1]:,}" in fleet.said(), fleet.said()[-2000:]
    assert sum(kinds.values()) == KILLS, f"finished after {kinds}"
    check_equal(run, straight, STEPS)
    done = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{done}; bits equal. At: {', '.join(seen)}"


def _disturb(fleet: Fleet, run: Run, chance: random.Random) -> tuple[str, str]:
    """Wait for a random moment of a start, and do something to it."""
    began = time.monotonic()
    before = run.step
    if chance.random() < 0.3:
        time.sleep(chance.uniform(0, 12))  # at start, in a compilation, a restore
    else:
        target = before + chance.randint(1, 12)
        fleet.await_that(lambda: run.step >= target or run.results)
        time.sleep(chance.uniform(0, 0.3))
    moment = f"{time.monotonic() - began:.1f} s, step {run.step}"
    who = chance.choice([(0,), (1,), (0, 1)])
    kind = chance.choice(["SIGKILL", "SIGTERM", "SIGSTOP"])
    if kind != "SIGSTOP":
        fleet.send(getattr(signal, kind), *who)
        return f"{kind} to {len(who)}", moment
    fleet.send(signal.SIGSTOP, *who)
    if len(who) == 1:  # the other gives up after its heartbeat
        fleet.processes[1 - who[0]].wait(120)
    else:
        time.sleep(chance.uniform(1, 14))  # some shorter than the heartbeat
    fleet.send(signal.SIGCONT, *who)
    if len(who) == 2:
        time.sleep(1)
        fleet.send(signal.SIGKILL, *who)
    return f"SIGSTOP to {len(who)}", moment
