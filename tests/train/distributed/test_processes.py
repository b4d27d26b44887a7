"""Several real processes find each other, agree, and name the one that differs.

Drills try how they end and resume when one is stopped or killed (tests/drills).
"""

from pathlib import Path

import pytest

from tests.fleet import TINY, Fleet, of_text, write_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("cluster"))


def overrides(folder: Path, run: str, *extra: str) -> list[str]:
    return [*TINY, *of_text(folder), f"run.dir={folder}/{run}", *extra]


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


def test_a_mistake_on_all_processes_is_printed_once(folder):
    # The mesh has one device, but the two processes have two.
    run = overrides(folder, "mistake", "mesh=single")
    fleet = Fleet(folder / "mistake-logs", run, 2)
    assert fleet.wait(60) == [78, 78]
    assert "must multiply to the 2 devices" in fleet.said(0)
    assert "mistake" not in fleet.said(1)
