"""Drills of runs that are killed, and of the effect on saves."""

import shutil
import signal
import time

from tests.drills.drill import drill, expect
from tests.drills.ground import HALF, Ground
from tests.drills.preemption import after_steps, goes_on
from tests.drills.run import Run, until


@drill(1)
def killed_before_the_first_save(ground: Ground) -> str:
    """SIGKILL arrives before anything is saved -> the exit code is 137; the next start
    begins at step 0, and has the losses and the bits of an undisturbed run."""
    run = ground.run("checkpoint.save_interval_steps=20")
    fleet = run.start()
    after_steps(run, fleet)
    fleet.send(signal.SIGKILL)
    expect("exit codes", fleet.wait(), [137])
    step = run.step
    expect("checkpoints", run.steps(), [])
    goes_on(run, 0)
    ground.check(run)
    return f"137 after step {step}, from step 0, bits equal"


@drill(2)
def killed_at_many_moments_of_a_save(ground: Ground) -> str:
    """SIGKILL arrives fourteen times, right after a save's rename or 0 to 0.4 s after a
    save begins -> each next start continues from the newest sealed step, leftovers are
    removed, and the end is the same."""
    run = ground.run("checkpoint.save_interval_steps=1")
    hits = dict.fromkeys(("writing", "renamed, not sealed", "sealed"), 0)
    for delay_s in (*[None] * 5, *(0.05 * n for n in range(9))):
        # Before any step is sealed, a start restores the newest one unverified.
        newest = max(run.sealed() or run.steps(), default=0)
        fleet = run.start()
        fleet.await_text("from step")
        assert f"from step {newest}\n" in fleet.said(), fleet.said()[-2000:]
        if delay_s is None:
            until(lambda step=newest + 1: run.folder(step).exists())
        else:
            fleet.await_that(lambda: any("tmp" in name for name in run.leftovers()))
            time.sleep(delay_s)
        fleet.send(signal.SIGKILL)
        expect("exit codes", fleet.wait(), [137])
        hits[_state_after_kill(run)] += 1
    goes_on(run, run.sealed()[-1])
    expect("leftovers", run.leftovers(), [])
    ground.check(run)
    return f"killed while {hits}; set aside {run.aside()}; no leftovers, bits equal"


def _state_after_kill(run: Run) -> str:
    if any("tmp" in name for name in run.leftovers()):
        return "writing"
    return "sealed" if run.steps() == run.sealed() else "renamed, not sealed"


@drill(3)
def killed_between_rename_and_seal(ground: Ground) -> str:
    """The digests of the newest step are removed and its mark of being written is put
    back, as a kill at that moment leaves them. Then the same is done to the only step
    of a run -> the first step is set aside for an older, sealed one; the second is
    restored with a warning, and sealed."""
    run = ground.half()
    _unseal(run, HALF)
    goes_on(run, HALF - 1)
    expect("set aside", run.aside(), [HALF])
    ground.check(run)
    only = ground.half(name="only")
    for step in only.steps()[:-1]:
        shutil.rmtree(only.folder(step))
    _unseal(only, HALF)
    fleet = only.finish("checkpoint.keep_every_steps=20")
    assert f"from step {HALF}\n" in fleet.said(), fleet.said()[-2000:]
    assert "used unverified, because no other is left" in fleet.said(), fleet.said()
    assert HALF in only.sealed(), only.sealed()
    ground.check(only)
    return (
        f"from step {HALF - 1}, {HALF} set aside; alone: taken unverified; bits equal"
    )


def _unseal(run: Run, step: int) -> None:
    (run.folder(step) / "digests.json").unlink()
    (run.checkpoints / "unsealed").mkdir(exist_ok=True)
    (run.checkpoints / "unsealed" / str(step)).touch()
