"""Timelines as HTML: a lane for computing and one for each network."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from train.plan.layer_schedule import (
    ATTENTION,
    COMPUTE,
    COPIES,
    MEMORY,
    PRODUCT,
    WAIT,
    Span,
    Timeline,
)
from train.run.charts import ticks

_KINDS = {
    PRODUCT: "products",
    ATTENTION: "attention",
    MEMORY: "other memory traffic",
    WAIT: "waits",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "collective-permute": "collective-permute",
    "all-to-all": "all-to-all",
}
_OTHER = "other"
_PIXELS = 1000  # as if it were drawn this wide
_LABEL = 0.045  # of the width: what a label needs
_LONGEST = 8

LIGHT = """--k-product: #4f86c6; --k-attention: #8468b0; --k-memory: #b9a06a;
  --k-wait: #f1d4d4; --k-all-gather: #3f9a78; --k-reduce-scatter: #d0762b;
  --k-all-reduce: #c2506e; --k-collective-permute: #2f9fb0; --k-all-to-all: #8a9a3c;
  --k-other: #8b95a1; --k-text: #ffffff;"""
DARK = """--k-product: #3f74b4; --k-attention: #7a5fb0; --k-memory: #8f7a48;
  --k-wait: #55292f; --k-all-gather: #2f7f62; --k-reduce-scatter: #b05f1e;
  --k-all-reduce: #a83f5c; --k-collective-permute: #23808f; --k-all-to-all: #6f7d2c;
  --k-other: #66707c;"""
STYLE = """.lanes { position: relative; min-width: 640px; padding-bottom: 24px; }
.lanes b { position: sticky; left: 0; display: inline-block; margin: 8px 0 2px;
  font-size: 12px; font-weight: 400; color: var(--soft); }
.track { position: relative; height: 26px; background: var(--rule);
  border-radius: 4px; overflow: hidden; }
.track i { position: absolute; top: 0; bottom: 0; padding: 0 4px; overflow: hidden;
  color: var(--k-text); font: 11px/26px system-ui, sans-serif; white-space: nowrap;
  text-overflow: ellipsis; box-shadow: inset 1px 0 var(--page); }
.track i:empty { padding: 0; } .track i:hover { filter: brightness(1.15); }
.track .wait { color: var(--ink); }
.wait { background-image: repeating-linear-gradient(
  135deg, transparent 0 5px, var(--page) 5px 6px); }
.axis { position: absolute; left: 0; right: 0; bottom: 0; height: 18px; }
.axis span { position: absolute; font-size: 11px; color: var(--soft);
  transform: translateX(-50%); white-space: nowrap; }
.axis span:first-child { transform: none; }
.lanes output { z-index: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 10px 0;
  font-size: 13px; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 7px;
  border-radius: 3px; }
h3 { font-size: 14px; font-weight: 600; margin: 22px 0 2px; }"""
SCRIPT = """
for (const lanes of document.querySelectorAll(".lanes")) {
  const tip = lanes.querySelector("output");
  lanes.onpointerleave = event => {
    if (event.pointerType !== "touch") tip.style.display = "none";
  };
  lanes.onpointermove = lanes.onpointerdown = event => {
    const text = event.target.dataset.tip;
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    const track = event.target.parentElement, half = lanes.clientWidth / 2;
    const x = event.clientX - lanes.getBoundingClientRect().left;
    tip.style.top = track.offsetTop + 32 + "px";
    tip.style.left = x < half ? x + "px" : "auto";
    tip.style.right = x < half ? "auto" : lanes.clientWidth - x + "px";
  };
}
"""


def timeline_figures(timelines: Sequence[Timeline]) -> str:
    """Draw timelines, each with a legend and what takes longest."""
    kinds = {_kind(span) for timeline in timelines for span in timeline.spans}
    legend = "".join(
        f'<span><i class="{kind}" style="background-color:var(--k-{kind})"></i>'
        f"{title}</span>"
        for kind, title in {**_KINDS, _OTHER: "other collectives"}.items()
        if kind in kinds
    )
    drawn = "".join(map(_timeline, timelines))
    return f'<div class="legend">{legend}</div>{drawn}'


def format_time(seconds: float) -> str:
    """Return a short time: `245.8 µs`, `9.49 ms`."""
    if not seconds:
        return "0"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _timeline(timeline: Timeline) -> str:
    total = timeline.seconds
    lanes = list(dict.fromkeys(span.lane for span in timeline.spans))
    lanes.sort(key=lambda lane: (lane != COMPUTE, lane == COPIES, lane))
    rows = []
    for lane in lanes:
        spans = [span for span in timeline.spans if span.lane == lane]
        working = sum(span.seconds for span in spans if span.kind != WAIT)
        note = f"{lane}, busy {format_time(working)} ({working / total:.0%})"
        drawn = "".join(_span(s, total) for s in merge(spans, total / _PIXELS))
        rows.append(f'<b>{escape(note)}</b><div class="track">{drawn}</div>')
    axis = "".join(
        f'<span style="left:{100 * tick / total:.2f}%">{format_time(tick)}</span>'
        for tick in ticks(0, total, 5)
        if tick < 0.97 * total
    )
    products = timeline.busy(PRODUCT, ATTENTION)
    waits = timeline.busy(WAIT)
    return (
        f"<h3>{timeline.name.capitalize()}: {format_time(total)}, "
        f"{timeline.trips:,} times</h3>"
        f'<p class="hint">{format_time(products)} with products and attention, '
        f"{format_time(waits)} waiting ({waits / total:.0%})</p>"
        f'<div class="scroll"><div class="lanes">{"".join(rows)}'
        f'<div class="axis">{axis}</div><output></output></div></div>'
        f"{_longest(timeline)}"
    )


def merge(spans: Sequence[Span], resolution_s: float) -> list[Span]:
    """Join neighbours that nobody could tell apart, and drop what is too small to see.

    Args:
        spans: of one lane, by their starts.
        resolution_s: the shortest time that shows.
    """
    groups = list[list[Span]]()
    for span in spans:
        if groups and _joins(groups[-1], span, resolution_s):
            groups[-1].append(span)
        else:
            groups.append([span])
    joined = map(_join, groups)
    return [span for span in joined if span.seconds >= resolution_s / 4]


def _joins(group: Sequence[Span], span: Span, resolution_s: float) -> bool:
    last = group[-1]
    if span.start_s - last.start_s - last.seconds > resolution_s:
        return False
    longest = max(last.seconds, span.seconds)
    same = last.kind == span.kind
    return longest < (4 if same else 1) * resolution_s or (
        same and last.label == span.label
    )


def _join(group: Sequence[Span]) -> Span:
    """Make one span of several, named like the longest."""
    first, last = group[0], group[-1]
    longest = max(group, key=lambda span: span.seconds)
    more = [f"and {len(group) - 1} more"] if len(group) > 1 else []
    return replace(
        longest,
        start_s=first.start_s,
        seconds=last.start_s + last.seconds - first.start_s,
        detail=", ".join(filter(None, [longest.detail, *more])),
    )


def _span(span: Span, total: float) -> str:
    left, width = 100 * span.start_s / total, 100 * span.seconds / total
    when = f"{format_time(span.seconds)} from {format_time(span.start_s)} on"
    tip = "\n".join(filter(None, (span.label, span.detail, when)))
    short = span.label.replace("collective-permute", "permute")
    label = escape(short) if width > 100 * _LABEL else ""
    kind = _kind(span)
    waits = ' class="wait"' if kind == WAIT else ""
    return (
        f'<i{waits} style="left:{left:.2f}%;width:{width:.2f}%;'
        f'background-color:var(--k-{kind})" data-tip="{escape(tip)}">{label}</i>'
    )


def _kind(span: Span) -> str:
    return span.kind if span.kind in _KINDS else _OTHER


def _longest(timeline: Timeline) -> str:
    """Return a table of what takes longest, as text."""
    groups = defaultdict[tuple[str, str], list[Span]](list)
    for span in timeline.spans:
        groups[span.lane, span.label].append(span)
    sums = {key: sum(s.seconds for s in spans) for key, spans in groups.items()}
    rows = []
    for lane, label in sorted(sums, key=lambda key: -sums[key])[:_LONGEST]:
        seconds = sums[lane, label]
        rows.append(
            f"<tr><td>{escape(label)}</td><td>{escape(lane)}</td>"
            f"<td>{len(groups[lane, label]):,}</td><td>{format_time(seconds)}</td>"
            f"<td>{seconds / timeline.seconds:.0%}</td></tr>"
        )
    return (
        f"<details><summary>What takes longest {timeline.name}</summary>"
        '<div class="scroll"><table><tr><th></th><th>Lane</th><th>Times</th>'
        f"<th>Time</th><th>Share</th></tr>{''.join(rows)}</table></div></details>"
    )
