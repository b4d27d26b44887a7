"""Drills of damaged checkpoints."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.drills.drill import drill, expect
from tests.drills.ground import HALF, Ground
from tests.drills.preemption import goes_on
from tests.drills.run import Run


def flip(file: Path, chance: random.Random | None = None) -> None:
    """Flip one bit of a file."""
    chance = chance or random.Random(0)
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def files(folder: Path) -> list[Path]:
    """List the files of a checkpoint that are not empty."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in paths if path.stat().st_size]


def falls_back(run: Run, damaged: list[int]) -> None:
    """Check that a start sets damaged steps aside, loudly, and takes the next older
    one."""
    oldest = min(damaged)
    fleet = run.finish()
    output = fleet.said()
    assert f"from step {oldest - 1}\n" in output, output[-2000:]
    for step in damaged:
        assert f"checkpoint of step {step} is damaged" in output, (
            f"step {step}: {output}"
        )
    expect("set aside", run.aside(), sorted(damaged))


@drill(9, promise="flipped bit")
def one_bit_of_each_file_flipped(ground: Ground) -> str:
    """Each of the newest steps has one bit flipped in a different file, so that every
    file is flipped once -> each of these steps is set aside, loudly; the start restores
    the newest intact step, and ends with the same bits."""
    run = ground.half()
    chance = random.Random(9)
    names = files(run.folder(HALF))
    steps = run.steps()[::-1][: len(names)]
    damaged_files = [
        files(run.folder(step))[number] for number, step in enumerate(steps)
    ]
    for file in damaged_files:
        flip(file, chance)
    falls_back(run, steps)
    ground.check(run)
    return f"all {len(names)} found, bits equal"


@drill(10)
def files_cut_zeroed_and_deleted(ground: Ground) -> str:
    """Each of the newest steps is damaged in a different way: array data is cut,
    zeroed, deleted or lengthened; the manifest is cut; metadata is deleted or emptied;
    digests are cut or deleted -> all these steps are set aside, none is deleted, and
    the newest intact step is restored."""
    run = ground.half()
    data = "state/d/*"
    ways: list[tuple[str, Callable[[Path], None]]] = [
        (data, lambda file: os.truncate(file, file.stat().st_size // 2)),
        (data, lambda file: file.write_bytes(bytes(file.stat().st_size))),
        (data, Path.unlink),
        (data, lambda file: file.write_bytes(file.read_bytes() + b"0")),
        ("state/manifest.ocdbt", lambda file: os.truncate(file, 10)),
        ("state/_METADATA", Path.unlink),
        ("_CHECKPOINT_METADATA", lambda file: os.truncate(file, 0)),
        ("digests.json", lambda file: os.truncate(file, 30)),
        ("digests.json", Path.unlink),
    ]
    steps = run.steps()[::-1][: len(ways)]
    for step, (name, damage) in zip(steps, ways, strict=True):
        damage(next(run.folder(step).glob(name)))
    falls_back(run, steps)
    ground.check(run)
    return f"{len(steps)} steps set aside, bits equal"


@drill(11)
def every_step_damaged(ground: Ground) -> str:
    """One bit is flipped in every step, and the run is started twice -> both starts
    exit with 65 and train nothing; once a good copy is put back, the run continues from
    it."""
    run = ground.half()
    chance = random.Random(11)
    good = ground.place / "good"
    shutil.copytree(run.folder(10), good)
    for step in run.steps():
        flip(next(run.folder(step).glob("state/d/*")), chance)
    metrics = (run.path / "metrics.jsonl").read_bytes()
    for _ in range(2):
        fleet = run.start()
        expect("exit codes", fleet.wait(), [65])
        assert "does not start over" in fleet.said(), fleet.said()
        assert (run.path / "metrics.jsonl").read_bytes() == metrics, "lines changed"
    shutil.copytree(good, run.folder(10))
    goes_on(run, 10)
    ground.check(run)
    return (
        f"65 twice, {len(run.aside())} steps set aside; from step 10 then, bits equal"
    )
