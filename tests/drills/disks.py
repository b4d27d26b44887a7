"""Drills of disks that are full, read-only, or do not answer."""

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.drills.drill import NotRun, drill, expect
from tests.drills.ground import HALF, Ground
from tests.drills.preemption import goes_on
from tests.drills.run import Run
from tests.fleet import Fleet

_ROOT = "needs a mount: root, or unshare --user --map-root-user --mount before it"


def command(requirement: str, *words: str | Path) -> None:
    """Run a system command.

    Raises:
        NotRun: if the command is missing or not permitted.
    """
    try:
        completed = subprocess.run([*map(str, words)], capture_output=True, text=True)
    except OSError as error:
        raise NotRun(f"{requirement} ({error})") from None
    if completed.returncode:
        raise NotRun(f"{requirement} ({completed.stderr.strip()})")


@contextmanager
def small_disk(ground: Ground) -> Iterator[Path]:
    """Mount a disk of 8 MiB, and unmount it at the end."""
    disk = ground.place / "disk"
    disk.mkdir()
    command(_ROOT, "mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk)
    try:
        yield disk
    finally:
        command(_ROOT, "umount", "-l", disk)


def fill(disk: Path) -> None:
    """Fill a disk to the last byte while other processes write to it."""
    with (disk / "ballast").open("wb") as file:
        while free := shutil.disk_usage(disk).free:
            with suppress(OSError):  # another process took some of it
                os.posix_fallocate(file.fileno(), file.tell(), free)
                file.seek(0, os.SEEK_END)


def is_saving(run: Run) -> bool:
    """Return whether a save is in flight, or was when its process was killed."""
    return any("tmp" in name for name in run.leftovers())


def alarms(fleet: Fleet) -> list[str]:
    """Return the lines that report a failed save."""
    lines = fleet.said().splitlines()
    return [line for line in lines if "was not saved" in line or "failed:" in line]


@drill(12, promise="full disk")
def disk_full(ground: Ground) -> str:
    """The disk is filled to the last byte until the run ends, and stays full for the
    next start. Then it is filled during a save, until the first alarm -> each failed
    save prints an alarm of one line, the sealed steps stay, and training continues;
    after more than max_failed_saves=2 the run ends with 1, and so does the next start;
    once there is room, the run saves again and ends with the same bits."""
    with small_disk(ground) as disk:
        run = ground.run("checkpoint.max_failed_saves=2")
        run.path = disk / "run"
        fleet = run.start()
        fleet.await_that(lambda: 5 in run.sealed())
        fill(disk)
        expect("exit codes", fleet.wait(), [1])
        first_alarms = alarms(fleet)
        expect("sealed", run.sealed(), [5])
        expect("exit codes", run.start().wait(), [1])
        (disk / "ballast").unlink()
        fleet = run.start("checkpoint.max_failed_saves=6")
        fleet.await_text("from step 5\n")
        fleet.await_that(lambda: is_saving(run))
        fill(disk)
        fleet.await_that(lambda: len(alarms(fleet)) >= 1)
        (disk / "ballast").unlink()
        expect("exit codes", fleet.wait(), [0])
        expect("leftovers", run.leftovers(), [])
        ground.check(run)
    return f"1 after {first_alarms}; 1; then {alarms(fleet)}, room, 0, bits equal"


@drill(13)
def read_only_checkpoints(ground: Ground) -> str:
    """The folder of checkpoints cannot be written from the first save to the third
    alarm -> each save prints an alarm, and training continues; then the run saves
    again."""
    run = ground.run("checkpoint.max_failed_saves=5")
    fleet = run.start()
    fleet.await_that(lambda: 5 in run.sealed())
    with read_only(run.checkpoints, run.checkpoints / "unsealed"):
        fleet.await_that(lambda: len(alarms(fleet)) >= 3)
        sealed = run.sealed()
    expect("exit codes", fleet.wait(), [0])
    expect("leftovers", run.leftovers(), [])
    ground.check(run)
    failed = [event["step"] for event in run.events("save_failed")]
    return f"sealed {sealed}, then no save at {failed}; writable: 0, bits equal"


@drill(13)
def three_starts_without_a_save(ground: Ground) -> str:
    """The folder of checkpoints cannot be written in three starts with
    max_failed_saves=0 -> each exits with 1 and never with 70, because the storage
    failed and not the step; then the run continues."""
    run = ground.half()
    with read_only(run.checkpoints, run.checkpoints / "unsealed"):
        for _ in range(3):
            fleet = run.start("checkpoint.max_failed_saves=0")
            expect("exit codes", fleet.wait(), [1])
            assert "1 saves in a row failed" in fleet.said(), fleet.said()[-2000:]
    expect("crashes", run.events("crash"), [])
    goes_on(run, HALF)
    ground.check(run)
    return f"1, 1, 1; writable: from step {HALF}, bits equal"


@drill(13)
def a_save_that_failed_does_not_delay_the_end(ground: Ground) -> str:
    """The folder of checkpoints, but not that of the marks, cannot be written until a
    save has failed. The run gets SIGTERM once it has saved again. Another start cannot
    save at all -> the exit codes are 42 and 1, and each process ends within minutes;
    then the run continues."""
    run = ground.run("checkpoint.max_failed_saves=50", "train.num_steps=5000")
    fleet = run.start()
    fleet.await_that(lambda: 5 in run.sealed())
    with read_only(run.checkpoints):
        fleet.await_that(lambda: any("failed:" in line for line in alarms(fleet)))
    failed_step = run.events("save_failed")[-1]["step"]
    fleet.await_that(lambda: max(run.sealed()) > failed_step)
    fleet.send(signal.SIGTERM)
    expect("exit codes", fleet.wait(240), [42])
    saved_step = run.sealed()[-1]
    with read_only(run.checkpoints):
        fleet = run.start("checkpoint.max_failed_saves=1")
        expect("exit codes", fleet.wait(240), [1])
    goes_on(run, saved_step, f"train.num_steps={saved_step + 5}")
    return f"42 after step {saved_step}; 1; then from step {saved_step}"


@contextmanager
def read_only(*paths: Path) -> Iterator[None]:
    """Make folders read-only for a while, even for root."""
    folders = [path for path in paths if path.exists()]
    if os.geteuid():
        subprocess.run(["chmod", "a-w", *folders], check=True)
    else:
        command("root is kept out by chattr +i alone", "chattr", "+i", *folders)
    try:
        yield
    finally:
        undo = ["chmod", "u+w"] if os.geteuid() else ["chattr", "-i"]
        subprocess.run([*undo, *folders], check=True)


@drill(13)
def storage_that_does_not_answer(ground: Ground) -> str:
    """The disk of the checkpoints is frozen during a save or right after it, until two
    saves were skipped -> training continues, with no more than one save in flight; once
    the disk is thawed, the run saves again."""
    run = ground.run("checkpoint.max_failed_saves=5")
    disk = ground.place / "disk"
    image = ground.place / "image"
    with image.open("wb") as file:
        file.truncate(2**25)
    command("needs mkfs.ext4", "mkfs.ext4", "-q", image)
    disk.mkdir()
    command(_ROOT, "mount", "-o", "loop", image, disk)
    try:
        run.path.mkdir()
        (disk / "checkpoints").mkdir()
        run.checkpoints.symlink_to(disk / "checkpoints")
        fleet = run.start()
        fleet.await_that(lambda: is_saving(run))
        command("needs fsfreeze", "fsfreeze", "--freeze", disk)
        try:
            began = time.monotonic()
            fleet.await_that(lambda: len(run.events("save_failed")) >= 2)
            frozen_s = time.monotonic() - began
            step = run.step
        finally:
            command("needs fsfreeze", "fsfreeze", "--unfreeze", disk)
        expect("exit codes", fleet.wait(), [0])
        lines = alarms(fleet)
        messages = "the previous save is still running", "the storage has not answered"
        assert all(any(text in line for text in messages) for line in lines)
        expect("leftovers", run.leftovers(), [])
        ground.check(run)
    finally:
        command(_ROOT, "umount", "-l", disk)
    return f"frozen for {frozen_s:.0f} s to step {step}: {lines}; then 0, bits equal"


@drill(14)
def the_last_save_fails_in_the_background(ground: Ground) -> str:
    """No file may be longer than 100 kB (RLIMIT_FSIZE) when the only save begins, after
    the last step -> the run ends with 1, one line and no results; the next start trains
    the run again."""
    run = ground.run("checkpoint.save_interval_steps=1000")
    fleet = run.start()
    fleet.await_text("from step")
    limit = (100_000, resource.RLIM_INFINITY)
    resource.prlimit(fleet.processes[0].pid, resource.RLIMIT_FSIZE, limit)
    expect("exit codes", fleet.wait(), [1])
    lines = [line for line in fleet.said().splitlines() if "last save" in line]
    assert len(lines) == 1, fleet.said()[-3000:]
    expect("finished", run.results, False)
    expect("sealed", run.sealed(), [])
    goes_on(run, 0)
    ground.check(run)
    return f"1: {lines[0]}; then from step 0, bits equal"
