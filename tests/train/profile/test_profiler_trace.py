"""Each moment of the traced steps goes to one instruction, or to waiting."""

from collections import Counter

import pytest

from train.profile.profiler_trace import Event, attribute_time, extend_events


def spent(*events, rank=lambda event: 0, begin=0.0, end=100.0):
    events = [Event(*event, "") for event in events]
    found = attribute_time(events, begin, end, rank)
    assert sum(found.values()) == pytest.approx(end - begin)
    by_name = Counter()
    for event, ns in found.items():
        by_name[event and event.instruction] += ns
    return {name: ns for name, ns in by_name.items() if ns}


def test_what_nothing_covers_is_waiting():
    found = spent((10, 20, "a"), (50, 60, "b"))
    assert found == {None: 80, "a": 10, "b": 10}
    assert spent() == {None: 100}


def test_of_nested_ones_the_innermost_counts():
    assert spent((0, 90, "outer"), (10, 40, "inner"), (20, 30, "core")) == {
        **{"outer": 60, "inner": 20, "core": 10, None: 10}
    }


def test_what_is_worth_most_hides_the_rest():
    """A collective costs only its time outside products, whichever began first."""

    def rank(event):
        return event.instruction == "gather"

    found = spent((10, 60, "gather"), (0, 40, "dot"), (70, 80, "dot"), rank=rank)
    assert found == {"dot": 50, "gather": 20, None: 30}
    found = spent((0, 40, "dot"), (10, 30, "gather"), rank=rank)
    assert found == {"dot": 40, None: 60}


def test_only_the_traced_steps_count():
    assert spent((0, 30, "a"), (80, 200, "b"), begin=20, end=90) == {
        **{"a": 10, "b": 10, None: 50}
    }


def test_what_other_threads_go_on_with_lasts_until_their_end():
    """Two runs of the same instruction have separate ends."""
    events = [Event(50, 52, "a", ""), Event(0, 2, "a", ""), Event(5, 9, "b", "")]
    found = extend_events(events, {"a": [61.0, 8.0], "c": [70.0]})
    assert [event.end for event in found] == [8, 9, 61]
