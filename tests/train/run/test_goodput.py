"""Where the time went: random histories, told by the log, against what happened."""

import tempfile
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.run.conftest import Clocks
from train.run import metrics
from train.run.goodput import goodput_of
from train.run.metrics import EventLog, read_events

SECONDS = st.floats(0.001, 1e5)
LAPS = st.one_of(
    st.tuples(st.sampled_from(["eval", "save"]), SECONDS, st.just(0)),
    st.tuples(st.just("step"), SECONDS, st.integers(1, 20)),
)


@st.composite
def histories(draw: st.DrawFn) -> list[dict]:
    """Starts: when, on what clock, from where, what laps, and how each ended."""
    return [
        {
            "gap": draw(SECONDS),
            "skew": draw(st.sampled_from([0.0, 0.0, 3600.0, -3600.0])),
            "imports": draw(SECONDS),
            "restores": draw(st.integers(0, 9)) > 0,  # or is killed before
            "back": draw(st.integers(0, 30)),  # steps done again
            "laps": draw(st.lists(LAPS, max_size=8)),
            "waits": draw(st.floats(0, 1)),  # share of a step's lap
            "lost": draw(SECONDS),  # after the last lap, if killed
            "noted": draw(st.sampled_from([None, 0.5])),  # share of `lost`: an instant
            "code": draw(st.sampled_from([None, 0, 42])),
        }
        for _ in range(draw(st.integers(1, 5)))
    ]


def play(
    history: list[dict], folder: str, clocks: Clocks
) -> tuple[Counter, float, int]:
    """Live through a history; return its true buckets, wall time, and wasted steps."""
    true = Counter()
    taken = list[tuple[int, float]]()
    step = 0
    wall_s = 0.0
    gap = 0.0
    wasted = 0
    for number, start in enumerate(history):
        clocks.now += gap + start["gap"] if number else 0.0
        if number:
            true["idle"] += gap + start["gap"]
        clocks.skew = start["skew"]
        began = clocks.now
        gap = 0.0

        def spend(event: str, seconds: float) -> None:
            clocks.now += seconds
            true[event] += seconds

        spend("start", start["imports"])
        log = EventLog(folder, began=began)
        log.lap("start")
        if start["restores"]:
            spend("restore", 1.0)
            step = max(0, step - start["back"])
            log.lap("restore", step=step)
            for _, seconds in taken[step:]:
                wasted += 1
                true["step"] -= seconds
                true["wasted"] += seconds
            taken = taken[:step]
            for event, seconds, steps in start["laps"]:
                waited = seconds * start["waits"] if steps else 0.0
                spend(event, seconds - waited)
                spend("data_wait", waited)
                if not steps:
                    log.lap(event)
                    continue
                step += steps
                taken += [(step, (seconds - waited) / steps)] * steps
                # As when a save cuts a window: then the step is not told.
                told = {"step": step} if steps % 2 else {}
                log.lap(event, {"data_wait": waited}, steps=steps, **told)
        wall_s = clocks.now
        if start["code"] is None:
            gap = start["lost"]  # killed: what was not recorded counts as idle
            if start["noted"]:
                clocks.now += gap * start["noted"]
                log.record("saved", step=step)
                clocks.now -= gap * start["noted"]
        else:
            spend("close", 1.0)
            log.record("skipped", step=step)
            log.end(start["code"])
            log.close()
            wall_s = clocks.now
    return true, wall_s, wasted


@settings(deadline=None, max_examples=150)
@given(histories())
def test_the_buckets_are_what_happened_and_add_up_to_the_wall_time(history):
    clocks = Clocks()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "time", clocks)
        true, wall_s, wasted = play(history, folder, clocks)
        found = goodput_of(read_events(folder))
    skewed = len({start["skew"] for start in history}) > 1
    for bucket, seconds in true.items():
        if bucket != "idle" or not skewed:
            got = found.buckets.get(bucket, 0.0)
            assert got == pytest.approx(seconds, rel=1e-3, abs=0.01), bucket
    assert not found.buckets.keys() - true.keys()
    if not skewed:
        assert found.wall_s == pytest.approx(wall_s, rel=1e-4, abs=0.01)
    assert sum(found.buckets.values()) == found.wall_s
    assert found.num_wasted == wasted
    assert [start.code for start in found.starts] == [s["code"] for s in history]
    useful = true["step"] / max(found.wall_s, 1e-9)
    assert found.fraction == pytest.approx(useful, rel=1e-3, abs=1e-4)


def test_what_is_said_of_it():
    events = [
        {"time": 10.0, "start": 1, "event": "start", "seconds": 10.0},
        {"time": 10.0, "start": 1, "event": "restore", "seconds": 0.0, "step": 0},
        {"time": 90.0, "start": 1, "event": "step", "seconds": 80.0, "steps": 8},
        {"time": 95.0, "start": 2, "event": "idle", "seconds": 5.0},
        {"time": 100.0, "start": 2, "event": "restore", "seconds": 5.0, "step": 6},
    ]
    assert str(goodput_of(events)) == (
        "60.0% of 1 min 40 s in 2 starts, 2 steps done again\n"
        "steps 60.0%, steps done again 20.0%, program start 10.0%, "
        "idle between starts 5.0%, restore 5.0%"
    )


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"event": "step"}, {"time": "x", "start": 1, "seconds": 1.0}],
        [{"time": 5.0, "start": 1, "event": "crash", "seconds": 0.0}],
        [{"time": 5.0, "start": 1, "event": "step", "seconds": float("nan")}],
        [{"time": 5.0, "start": 2, "event": "idle", "seconds": 0.0}],
    ],
)
def test_odd_lines_count_for_nothing(events):
    found = goodput_of(events)
    assert (found.buckets, found.wall_s, found.fraction) == ({}, 0, 0)
    assert str(found)
