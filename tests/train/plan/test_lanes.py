"""What is drawn of a timeline is the timeline, as far as one can see."""

import pytest

from train.plan.lanes import format_time, merge, timeline_figures
from train.plan.layer_schedule import COMPUTE, MEMORY, PRODUCT, WAIT, Span, Timeline


def span(kind: str, start: float, seconds: float, label: str = "x") -> Span:
    return Span(COMPUTE, kind, start, seconds, label, "detail")


def test_neighbours_join_what_is_alone_stays_and_specks_go():
    spans = [
        span(PRODUCT, 0, 1),
        span(PRODUCT, 1, 1),
        span(MEMORY, 2.2, 0.001),
        span(PRODUCT, 2.5, 1),
        span(PRODUCT, 3.5, 1, "y"),
        span(WAIT, 4.5, 1),
    ]
    drawn = [(s.kind, s.start_s, s.seconds, s.label) for s in merge(spans, 0.1)]
    assert drawn == [
        (PRODUCT, 0, 2, "x"),
        (PRODUCT, 2.5, 1, "x"),
        (PRODUCT, 3.5, 1, "y"),
        (WAIT, 4.5, 1, "x"),
    ]
    assert merge(spans, 0.1)[0].detail == "detail, and 1 more"


@pytest.mark.parametrize("kinds", [(MEMORY,), (MEMORY, WAIT)])
def test_thousands_of_small_spans_show_as_one(kinds):
    spans = [span(kinds[n % len(kinds)], n / 1000, 0.0009) for n in range(10_000)]
    (drawn,) = merge(spans, 0.01)
    assert drawn.seconds == pytest.approx(9.9999)


def test_bars_lie_where_their_time_is():
    spans = [span(PRODUCT, 0, 3e-3, "mlp<b>"), span(WAIT, 3e-3, 1e-3, "waits")]
    html = timeline_figures([Timeline("forward", 12, spans)])
    assert "left:0.00%;width:75.00%" in html
    assert "left:75.00%;width:25.00%" in html
    assert "Forward: 4.00 ms, 12 times" in html
    assert "1.00 ms waiting (25%)" in html
    assert "<b>mlp" not in html.replace("mlp&lt;b&gt;", "")
    assert "mlp&lt;b&gt;\ndetail\n3.00 ms from 0 on" in html


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (2.458e-4, "245.8 µs"), (9.488e-3, "9.49 ms"), (2.0, "2.00 s")],
)
def test_times_are_short(seconds, text):
    assert format_time(seconds) == text
