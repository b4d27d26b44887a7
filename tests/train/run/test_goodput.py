"""The goodput that is read from the log of a random history is the true one."""

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
    """Draw the starts of a run, each with its time, clock, step, laps and end."""
    return [
        {
            "gap": draw(SECONDS),
            "skew": draw(st.sampled_from([0.0, 0.0, 3600.0, -3600.0])),
            "imports": draw(SECONDS),
            # A start that does not restore is killed before that.
            "restores": draw(st.integers(0, 9)) > 0,
            "back": draw(st.integers(0, 30)),  # steps done again
            "laps": draw(st.lists(LAPS, max_size=8)),
            "waits": draw(st.floats(0, 1)),  # share of a step's lap
            "lost": draw(SECONDS),  # after the last lap, if killed
            "noted": draw(st.sampled_from([None, 0.5])),  # share of `lost`
            "code": draw(st.sampled_from([None, 0, 42])),
        }
        for _ in range(draw(st.integers(1, 5)))
    ]


def play(
    history: list[dict], folder: str, clocks: Clocks
) -> tuple[Counter, float, int]:
    """Play a history, and return its true buckets, wall time and wasted steps."""
    true_buckets = Counter()
    step_times = list[tuple[int, float]]()
    step = 0
    wall_s = 0.0
    gap = 0.0
    wasted = 0
    for number, start in enumerate(history):
        clocks.now += gap + start["gap"] if number else 0.0
        if number:
            true_buckets["idle"] += gap + start["gap"]
        clocks.skew = start["skew"]
        start_time = clocks.now
        gap = 0.0

        def spend(event: str, seconds: float) -> None:
            clocks.now += seconds
            true_buckets[event] += seconds

        spend("start", start["imports"])
        log = EventLog(folder, began=start_time)
        log.lap("start")
        if start["restores"]:
            spend("restore", 1.0)
            step = max(0, step - start["back"])
            log.lap("restore", step=step)
            for _, seconds in step_times[step:]:
                wasted += 1
                true_buckets["step"] -= seconds
                true_buckets["wasted"] += seconds
            step_times = step_times[:step]
            for event, seconds, steps in start["laps"]:
                wait_s = seconds * start["waits"] if steps else 0.0
                spend(event, seconds - wait_s)
                spend("data_wait", wait_s)
                if not steps:
                    log.lap(event)
                    continue
                step += steps
                step_times += [(step, (seconds - wait_s) / steps)] * steps
                # The step is not recorded if a save cuts a window.
                step_field = {"step": step} if steps % 2 else {}
                log.lap(event, {"data_wait": wait_s}, steps=steps, **step_field)
        wall_s = clocks.now
        if start["code"] is None:
            gap = start["lost"]  # after a kill, time without a record is idle
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
    return true_buckets, wall_s, wasted


@settings(deadline=None, max_examples=150)
@given(histories())
def test_the_buckets_are_true_and_add_up_to_the_wall_time(history):
    clocks = Clocks()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "time", clocks)
        true_buckets, wall_s, wasted = play(history, folder, clocks)
        goodput = goodput_of(read_events(folder))
    skewed = len({start["skew"] for start in history}) > 1
    for bucket, seconds in true_buckets.items():
        if bucket != "idle" or not skewed:
            actual = goodput.buckets.get(bucket, 0.0)
            assert actual == pytest.approx(seconds, rel=1e-3, abs=0.01), bucket
    assert not goodput.buckets.keys() - true_buckets.keys()
    if not skewed:
        assert goodput.wall_s == pytest.approx(wall_s, rel=1e-4, abs=0.01)
    assert sum(goodput.buckets.values()) == goodput.wall_s
    assert goodput.num_wasted == wasted
    assert [start.code for start in goodput.starts] == [s["code"] for s in history]
    useful = true_buckets["step"] / max(goodput.wall_s, 1e-9)
    assert goodput.fraction == pytest.approx(useful, rel=1e-3, abs=1e-4)


def test_goodput_is_described_in_two_lines():
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
def test_odd_lines_are_ignored(events):
    goodput = goodput_of(events)
    assert (goodput.buckets, goodput.wall_s, goodput.fraction) == ({}, 0, 0)
    assert str(goodput)
