"""Drills of data: batches that spoil a run, damaged stores, workers that die."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.drills.damage import flip
from tests.drills.drill import drill, expect
from tests.drills.ground import SLOWER, STEPS, Ground, check_equal, command_of
from tests.drills.preemption import after_steps
from tests.drills.run import Run

_WRONG_DATA = 65


@drill(19)
def updates_that_are_not_finite(ground: Ground) -> str:
    """The learning rate is 1e30, with max_skipped_steps=3 and a save after each step ->
    the updates are skipped and recorded with their batches; the run stops with 3; every
    number in every checkpoint is finite."""
    run = ground.run(
        *("optimizer.learning_rate=1e30", "train.max_skipped_steps=3"),
        *("checkpoint.save_interval_steps=1", "checkpoint.keep_every_steps=1"),
    )
    fleet = run.start()
    expect("exit codes", fleet.wait(), [3])
    skipped = run.events("skipped")
    steps = [event["step"] for event in skipped]
    expect("steps left out", steps, [*range(run.step - 3, run.step + 1)])
    expect("batches", [event["batch"] for event in skipped], [s - 1 for s in steps])
    for step in run.sealed():
        for name, array in run.arrays(step).items():
            assert np.isfinite(array).all(), f"{name} of step {step} is not finite"
    return f"3; left out: steps {steps}; finite: steps {run.sealed()}"


@drill(19, promise="bad batch")
def a_spike_and_going_back_before_it(ground: Ground) -> str:
    """A loss 1.8 sigma above the last 16 steps is a spike, and the first one stops the
    run. Each time, run.rewind_to goes back two steps and data.skip_batches skips the
    batch -> each stop exits with 3 and names the batch; the end is bitwise equal to
    that of a run that skipped these batches from its start."""
    sigma = (
        "train.skip_sigma=1.8",
        "train.skip_window=16",
        "train.max_skipped_steps=0",
    )
    run = ground.run(*sigma, "checkpoint.save_interval_steps=1")
    pairs: list[tuple[int, int]] = []
    fleet = run.start("checkpoint.keep_latest=5")
    while (code := fleet.wait()[0]) == 3 and len(pairs) < 40:
        event = run.events("skipped")[-1]
        expect("reason", event["reason"], "spike")
        message = f"step {event['step']:,} (batch {event['batch']:,}, spike)"
        assert message in fleet.said(), fleet.said()[-2000:]
        pairs = sorted([*pairs, (event["batch"], event["batch"])])
        fleet = run.start(
            "checkpoint.keep_latest=5",
            f"run.rewind_to={max(0, event['step'] - 2)}",
            f"data.skip_batches={[number for pair in pairs for number in pair]}",
        )
    expect("last exit code", code, 0)
    assert pairs, "there was no spike"
    left_out = f"data.skip_batches={[number for pair in pairs for number in pair]}"
    reference = ground.run(*sigma, left_out, name="whole")
    reference.finish()
    check_equal(run, reference, STEPS)
    return f"3 and back {len(pairs)} times, batches {[p for p, _ in pairs]}; bits equal"


@drill(20)
def damaged_store(ground: Ground) -> str:
    """A shard of a token store is cut, flipped, emptied or deleted, its description is
    deleted, or the manifest is flipped -> each start exits with 65 before the first
    step and names the file."""
    intact = ground.place / "whole"
    maker = ground.run().other(
        *("data.prepare", f"input={ground.text}", f"output={intact}", "validation=0.1")
    )
    expect("exit codes", maker.wait(), [0])
    ways: list[tuple[str, Callable[[Path], object]]] = [
        ("train/tokens/c/0", lambda file: os.truncate(file, file.stat().st_size // 2)),
        ("train/tokens/c/0", flip),
        ("train/offsets/c/0", lambda file: file.write_bytes(b"")),
        ("train/tokens/c/0", Path.unlink),
        ("train/tokens/zarr.json", Path.unlink),
        ("manifest.json", flip),
    ]
    for number, (name, damage) in enumerate(ways):
        store = ground.place / f"store-{number}"
        shutil.copytree(intact, store)
        damage(store / name)
        run = ground.run(name=f"run-{number}")
        run.overrides = (*run.overrides, "data=tokens", f"data.path={store}")
        fleet = run.start()
        expect(f"exit codes of {name}", fleet.wait(), [_WRONG_DATA])
        damaged_path = f"{store}/{name.removesuffix('/zarr.json')}"
        assert damaged_path in fleet.said(), fleet.said()
        expect("lines", run.losses(), {})
    return f"65 {len(ways)} times, each file named"


@drill(21)
def a_worker_killed_and_its_trainer(ground: Ground) -> str:
    """Two workers encode 64 MB of text. SIGKILL hits one of them in the first start,
    the trainer in the second, and the trainer during training in the third -> the first
    start exits with 65 within seconds; all processes and shared memory are gone within
    seconds; the third start trains."""
    folder = ground.place / "texts"
    previous_memory = _shared_memory()
    folder.mkdir()
    text = ground.text.read_text()
    for number in range(8):
        (folder / f"{number}.txt").write_text(text * (2**23 // len(text)))
    run = ground.run()
    run.overrides = (*run.overrides, f"data.path={folder}")
    fleet = run.start()
    os.kill(_await_worker(ground, fleet), signal.SIGKILL)
    began = time.monotonic()
    expect("exit codes", fleet.wait(), [_WRONG_DATA])
    took = time.monotonic() - began
    assert took < 20 * SLOWER, f"it took {took:.1f} s"
    assert "a worker process died" in fleet.said(), fleet.said()[-2000:]
    gone_s = [_gone_after(ground)]
    fleet = run.start()
    _await_worker(ground, fleet)
    fleet.send(signal.SIGKILL)
    gone_s.append(_gone_after(ground))
    fleet = run.start()
    after_steps(run, fleet)
    fleet.send(signal.SIGKILL)
    gone_s.append(_gone_after(ground))
    expect("new shared memory", _shared_memory() - previous_memory, set())
    return f"65 after {took:.1f} s; all processes gone after {gone_s} s"


def _await_worker(ground: Ground, fleet) -> int:
    workers: list[int] = []

    def workers_encode() -> bool:
        workers[:] = [p for p in ground.survivors() if _encodes(p)]
        return len(workers) >= 2

    fleet.await_that(workers_encode)
    return workers[0]


def _encodes(pid: int) -> bool:
    """Return whether a process is a worker that has begun to write its part.

    Before that, Python prints a traceback of its own if the parent is killed.
    """
    try:
        files = [f.readlink().name for f in Path(f"/proc/{pid}/fd").iterdir()]
        return "spawn_main" in command_of(pid) and any(".part" in f for f in files)
    except OSError:
        return False  # the process has ended


def _gone_after(ground: Ground) -> float:
    """Wait until all processes of the drill have ended; return the seconds."""
    began = time.monotonic()
    while pids := ground.survivors():
        assert time.monotonic() - began < 20 * SLOWER, [command_of(pid) for pid in pids]
        time.sleep(0.05)
    return round(time.monotonic() - began, 1)


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@drill(22)
def other_numbers_of_batches_read_ahead(ground: Ground) -> str:
    """A run continues with data.prefetch=1 to step 30, and with data.prefetch=7 to the
    end; the loader has threads and no workers -> both values are accepted, and the bits
    are the same."""
    run: Run = ground.half()
    run.finish("data.prefetch=1", "train.num_steps=30")
    run.finish("data.prefetch=7")
    ground.check(run)
    return "0 and 0, bits equal"
