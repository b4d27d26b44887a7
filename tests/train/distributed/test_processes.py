"""Several real processes: they find each other, agree, and name who is amiss.

How they end and go on when one is stopped or killed is drilled (tests/drills).
"""

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


def test_two_processes_train_as_one_and_only_the_first_talks(folder):
    one = Fleet(folder / "straight", overrides(folder, "one"))
    assert one.wait() == [0], one.said()
    fleet = Fleet(folder / "two", overrides(folder, "two-run"), 2)
    assert fleet.wait() == [0, 0], fleet.said() + fleet.said(1)
    assert steps(folder / "two-run") == pytest.approx(steps(folder / "one"), rel=1e-5)
    assert "finished    20 steps" in fleet.said(0)
    talk = [line for line in fleet.said(1).splitlines() if "step" in line]
    assert talk == []


def test_a_signal_while_nothing_is_trained_yet_ends_all_at_once(folder):
    run = overrides(folder, "early", "model.num_layers=3")
    fleet = Fleet(folder / "early-logs", run, 2)
    fleet.await_text("devices     2 x cpu")  # about to compile
    began = time.monotonic()
    fleet.send(signal.SIGTERM, 1)
    assert fleet.wait(60) == [42, 42], fleet.said() + fleet.said(1)
    assert time.monotonic() - began < 30
    assert not (folder / "early/metrics.jsonl").exists() or not steps(folder / "early")


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
