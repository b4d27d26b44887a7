"""All drills run, and a drill that fails is reported."""

import subprocess
import sys
import time

import pytest

from tests.drills.catalog import DRILLS
from tests.drills.drill import Drill, NotRun, carry_out, expect
from tests.drills.ground import Ground


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("drills"))


def case(drill: Drill):
    marks = [pytest.mark.promise] if drill.promise else []
    return pytest.param(drill, marks=marks, id=f"{drill.number}-{drill.name}")


@pytest.mark.slow
@pytest.mark.parametrize("drill", [case(d) for d in DRILLS])
def test_the_promise_holds(drill: Drill, ground: Ground):
    outcome = carry_out(drill, ground)
    if outcome.held is None:
        pytest.skip(outcome.seen)
    assert outcome.held, outcome.seen


def test_each_listed_fault_has_a_drill_with_a_description():
    numbers = {drill.number for drill in DRILLS}
    assert numbers == {*range(1, 33), 41, "kills"}
    for drill in DRILLS:
        assert all(drill.done_and_expected), drill.name
    assert len({drill.promise for drill in DRILLS if drill.promise}) == 8


def breaks_a_promise(ground: Ground) -> str:
    expect("exit codes", [0], [42])
    return "held"


def leaves_an_orphan(ground: Ground) -> str:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    subprocess.Popen(command, env=ground.environment)
    while not ground.survivors():  # a new process has no environment yet
        time.sleep(0.01)
    return "held"


def leaves_a_traceback(ground: Ground) -> str:
    (ground.place / "log.0").write_text("Traceback (most recent call last):\n  boom")
    return "held"


def is_not_permitted(ground: Ground) -> str:
    raise NotRun("needs root")


@pytest.mark.parametrize(
    ("act", "held", "seen"),
    [
        (breaks_a_promise, False, "exit codes: [0], expected [42]"),
        (leaves_a_traceback, False, "boom"),
        (is_not_permitted, None, "needs root"),
        (leaves_an_orphan, False, "sleep(60)"),
    ],
)
def test_the_outcome_of_a_drill_is_told(ground: Ground, monkeypatch, act, held, seen):
    monkeypatch.setattr(Ground, "patience_s", 1.0)
    outcome = carry_out(Drill(0, act), ground)
    assert outcome.held is held
    assert seen in outcome.seen
    assert Ground(ground.root, f"0-{act.__name__}").survivors() == []
