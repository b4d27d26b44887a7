"""Several real processes: they find each other, agree, and name who is amiss."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.fleet import TINY, Fleet, of_text, write_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("cluster"))


def overrides(folder: Path, run: str, *more: str) -> list[str]:
    return [*TINY, *of_text(folder), f"run.dir={folder}/{run}", *more]


def steps(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[int, float]:
    """The losses of one process that nothing disturbed."""
    fleet = Fleet(folder / "straight", overrides(folder, "one"))
    assert fleet.wait() == [0], fleet.said()
    return steps(folder / "one")


def test_two_processes_train_as_one_and_only_the_first_talks(folder, straight):
    fleet = Fleet(folder / "two", overrides(folder, "two-run"), 2)
    assert fleet.wait() == [0, 0], fleet.said() + fleet.said(1)
    assert steps(folder / "two-run") == pytest.approx(straight, rel=1e-5)
    assert "finished    20 steps" in fleet.said(0)
    talk = [line for line in fleet.said(1).splitlines() if "step" in line]
    assert talk == []


def test_one_signal_to_one_process_stops_all_after_the_same_step(folder, straight):
    """SIGUSR1 to the second: a verified save, 42, and the same curve goes on."""
    run = overrides(folder, "stopped", "train.num_steps=400")
    fleet = Fleet(folder / "stop", run, 2)
    fleet.await_that(lambda: len(steps_so_far(folder / "stopped")) >= 3)
    fleet.send(signal.SIGUSR1, 1)
    assert fleet.wait(60) == [42, 42], fleet.said() + fleet.said(1)
    (step,) = [int(p.name) for p in (folder / "stopped/checkpoints").glob("[1-9]*")][
        -1:
    ]
    assert step == max(steps(folder / "stopped"))
    assert (folder / f"stopped/checkpoints/{step}/digests.json").exists()
    again = Fleet(
        folder / "again", overrides(folder, "stopped", f"train.num_steps={step + 3}"), 2
    )
    assert again.wait() == [0, 0], again.said()
    assert f"from step {step:,}" in again.said()
    both = {s: loss for s, loss in steps(folder / "stopped").items() if s in straight}
    assert len(both) >= 3
    # The schedule is longer, so only the warm-up's first steps are the same.
    assert both[1] == pytest.approx(straight[1], rel=1e-5)


def steps_so_far(run: Path) -> dict[int, float]:
    return steps(run) if (run / "metrics.jsonl").exists() else {}


def test_a_signal_while_nothing_is_trained_yet_ends_all_at_once(folder):
    run = overrides(folder, "early", "model.num_layers=3")
    fleet = Fleet(folder / "early-logs", run, 2)
    fleet.await_text("devices     2 x cpu")  # about to compile
    began = time.monotonic()
    fleet.send(signal.SIGTERM, 1)
    assert fleet.wait(60) == [42, 42], fleet.said() + fleet.said(1)
    assert time.monotonic() - began < 30
    assert not (folder / "early/metrics.jsonl").exists() or not steps(folder / "early")


def test_a_process_that_never_comes_is_named(folder):
    run = overrides(folder, "never", "distributed.init_timeout_s=6")
    fleet = Fleet(folder / "never-logs", run, 3, missing=[1])
    assert fleet.wait(60) == [134, 134]
    assert "no sign of process 1 of 3 within" in fleet.said(0)
    assert "no sign of process 1 of 3 within" in fleet.said(2)
    assert not (folder / "never").exists()


def test_a_process_that_differs_is_named(folder):
    run = overrides(folder, "differs")
    fleet = Fleet(
        folder / "differs-logs",
        run,
        3,
        own=lambda process: ["seed=7"] if process == 1 else [],
    )
    assert fleet.wait(60) == [78, 78, 78]
    assert "config:" in fleet.said(0)
    assert "on processes 0, 2" in fleet.said(0)
    assert "on process 1 (host" in fleet.said(0)
    assert not (folder / "differs").exists()


def test_a_mistake_on_all_is_said_once(folder):
    run = overrides(folder, "mistake", "mesh=single")  # of two devices
    fleet = Fleet(folder / "mistake-logs", run, 2)
    assert fleet.wait(60) == [78, 78]
    assert "must multiply to the 2 devices" in fleet.said(0)
    assert "mistake" not in fleet.said(1)


def test_the_data_missing_on_one_process_is_said_by_name(folder):
    run = overrides(folder, "missing")
    fleet = Fleet(
        folder / "missing-logs",
        run,
        2,
        own=lambda p: ["data.path=/nowhere", "data.cache_dir=/tmp"] if p else [],
    )
    assert set(fleet.wait(60)) <= {65, 78}
    assert "process 1" in fleet.said(0)


def test_one_process_killed_ends_all_and_the_next_start_goes_on(folder, straight):
    run = overrides(folder, "killed", "train.num_steps=60")
    fleet = Fleet(folder / "kill", run, 2)
    fleet.await_that(lambda: (folder / "killed/checkpoints/5/digests.json").exists())
    fleet.send(signal.SIGKILL, 0)
    assert fleet.wait(60)[1] == 134, fleet.said(1)
    again = Fleet(folder / "go-on", run, 1)  # on one
    assert again.wait() == [0], again.said()
    assert "from step" in again.said()
    assert sorted(steps(folder / "killed")) == [*range(1, 61)]


def test_one_run_on_ever_other_processes_and_meshes(folder):
    """1 -> 2 -> 4 -> 1 processes, fsdp -> fsdp -> tensor -> data: the same losses."""
    constant = ("schedule=constant", "eval.num_batches=1")
    whole = overrides(folder, "whole", *constant, "train.num_steps=40")
    fleet = Fleet(folder / "whole-logs", whole)
    assert fleet.wait() == [0], fleet.said()
    stages = [
        (1, "mesh=fsdp", "runtime.cpu_devices=2"),
        (2, "mesh=fsdp"),
        (4, "mesh.fsdp=2", "mesh.tensor=2"),
        (1, "mesh.data=2", "mesh.fsdp=1", "runtime.cpu_devices=2"),
    ]
    for stage, (count, *mesh) in enumerate(stages, 1):
        more = (*constant, *mesh, f"train.num_steps={10 * stage}")
        fleet = Fleet(folder / f"{stage}", overrides(folder, "elastic", *more), count)
        assert fleet.wait() == [0] * count, fleet.said()
        assert f"from step {10 * (stage - 1)}" in fleet.said()
    assert steps(folder / "elastic") == pytest.approx(steps(folder / "whole"), rel=1e-5)
