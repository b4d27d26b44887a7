"""Twenty kills at random moments of one run, which a loop starts again by its codes.

What a launcher does: 0 is the end, the codes of `_AGAIN` mean another start, and
anything else is a failure. Nobody looks into the run's directory in between.
"""

import random
import signal
import time
from typing import NamedTuple

from tests.drills.drill import drill, expect
from tests.drills.ground import Ground, check_equal
from tests.drills.run import Run, until
from tests.fleet import Fleet

_AGAIN = {42, 75, 134, 137, 143}
_KILLS, _STEPS, _INTERVAL = 20, 400, 10
_SEED = 20


class Kill(NamedTuple):
    """What happens to a start, and when.

    after_steps: whether the delay begins with the first new step, or with the start.
    signals: of each process; SIGSTOP for as long as the other one lives.
    """

    after_steps: bool
    delay_s: float
    signals: dict[int, int]

    def __str__(self) -> str:
        names = [f"{signal.Signals(n).name} {p}" for p, n in self.signals.items()]
        since = "steps" if self.after_steps else "start"
        return f"{' '.join(names)} {self.delay_s:.1f} s into {since}"


def draw(chance: random.Random) -> Kill:
    """Draw one: half of them while it trains, most of one process of the two."""
    kinds = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
    after_steps = chance.random() < 0.6
    delay_s = chance.uniform(0, 2) if after_steps else chance.uniform(0, 15)
    which = chance.choice([(0,), (1,), (0,), (1,), (0, 1)])
    # Were both to stop, nobody would be there to notice.
    signals = {p: chance.choice(kinds[: 3 if len(which) == 1 else 2]) for p in which}
    return Kill(after_steps, delay_s, signals)


@drill("kills")
def twenty_kills_of_two_processes(ground: Ground) -> str:
    """A run of 400 steps on two processes, saved every 10, is killed twenty times at
    random moments (SIGKILL, SIGTERM, SIGSTOP; one process or both) and started again
    by its exit codes alone -> no code but 0, 42, 75, 134, 137, 143; each time no more
    is lost than an interval and what a save takes; in the end the losses and bits of a
    run that nothing disturbed."""
    overrides = (
        *(f"train.num_steps={_STEPS}", f"checkpoint.save_interval_steps={_INTERVAL}"),
        "distributed.init_timeout_s=40",
    )
    ground.traceback = True  # of collectives whose other side was killed
    straight = ground.run(*overrides, name="straight")
    straight.finish(count=2)
    run, chance, lost = ground.run(*overrides), random.Random(_SEED), []
    for number in range(1, _KILLS + 1):
        kill, starts = draw(chance), len(run.events("start"))
        fleet = run.start(count=2)
        moment = inflict(kill, run, fleet)
        codes = fleet.wait(180)
        assert not {*codes} - _AGAIN, f"{kill}: {codes}: {fleet.said()[-3000:]}"
        began = len(run.events("start")) > starts
        phase = run.phase_at(moment) if began else "start"
        lost.append(run.step - max(run.sealed(), default=0))
        what = f"{number:>2} {kill}, in {phase}: {codes}"
        print(f"     {what}; step {run.step}, {lost[-1]} lost", flush=True)
    assert not run.results, "it was through before the last kill: _STEPS is too small"
    last = run.start(count=2)
    expect("last exit codes", last.wait(600), [0, 0])
    check_equal(run, straight, _STEPS)
    assert max(lost) <= 2 * _INTERVAL, f"steps lost: {lost}"
    return f"steps lost by each kill: {lost}; losses and parameters equal to the bit"


def inflict(kill: Kill, run: Run, fleet: Fleet) -> float:
    """Wait for the moment, send the signals if it still runs, and say when that was."""
    before = run.step
    if kill.after_steps:
        until(lambda: run.step > before or ended(fleet))
    began = time.monotonic()
    until(lambda: time.monotonic() > began + kill.delay_s or ended(fleet))
    moment = time.time()
    for process, number in kill.signals.items():
        fleet.send(number, process)
    for process, number in kill.signals.items():
        if number == signal.SIGSTOP:
            # The other one misses its heartbeats; the stopped one is never heard of.
            fleet.processes[1 - process].wait(120)
            fleet.send(signal.SIGKILL, process)
    return moment


def ended(fleet: Fleet) -> bool:
    """Say whether none of its processes is left."""
    return all(process.poll() is not None for process in fleet.processes)
