"""The picture of a plan: `plan.html`, one file that needs no network.

Drawn by `plan.html` beside this file from what `plan.json` holds: the plan's figures,
and with them one layer on the clock and where arrays lie.
"""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from train.cli.schema import to_yaml
from train.hardware.chips import chip_of
from train.plan.array_layout import layout_data
from train.plan.compiled.hlo import Module
from train.plan.layer_schedule import (
    ATTENTION,
    COMPUTE,
    COPIES,
    PRODUCT,
    WAIT,
    Span,
    Timeline,
    layer_timelines,
)
from train.plan.rates import rates_of
from train.program import Program

TEMPLATE = Path(__file__).with_name("plan.html")
_PIXELS = 1000  # as if a timeline were drawn this wide
_LONGEST = 8


def page_data(
    program: Program,
    module: Module | None,
    summary: Sequence[tuple[str, str]],
    command: Sequence[str],
) -> dict[str, Any]:
    """Return what the page shows beside the plan's figures, as plain values.

    Args:
        program: on the devices in question.
        module: its compiled step; None: nothing was compiled.
        summary: names and sentences: what the step's speed is predicted to be.
        command: the arguments that make this plan.
    """
    data = program.config.data
    return {
        "rows": data.batch_size,
        "sequence_length": data.sequence_length,
        "summary": summary,
        "command": shlex.join(["python", "-m", "train.plan", *command]),
        "config": to_yaml(program.config),
        "layers": layers_data(program, module),
        "layout": layout_data(program),
    }


def layers_data(program: Program, module: Module | None) -> dict[str, Any]:
    """Return the timelines of a layer and the rates they are computed from.

    Returns:
        missing: why there are none; "" if there are.
        flops, memory: a second, of products and to and from main memory.
        passes: `pass_data` of each.
    """
    chip = chip_of(program.mesh.devices.flat[0].device_kind)
    if module is None:
        return {"missing": "There is no compiled step whose schedule could be shown."}
    if chip is None:
        why = "what this machine does in a second is not known"
        return {"missing": f"Not drawn: {why}."}
    try:
        rates = rates_of(program.mesh, chip, program.config.model.compute_dtype)
        timelines = layer_timelines(module, program.mesh, rates)
    except ValueError as error:
        return {"missing": f"Not drawn: {error}."}
    return {
        "missing": "" if timelines else "The compiled step has no loop over layers.",
        "flops": rates.flops,
        "memory": rates.memory,
        "passes": list(map(pass_data, timelines)),
    }


def pass_data(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline by lanes, spans too short to tell apart merged.

    `longest` are the labels of a lane whose spans together take longest.
    """
    lanes, labels = defaultdict(list), defaultdict(list)
    for span in timeline.spans:
        lanes[span.lane].append(span)
        labels[span.label, span.lane].append(span.seconds)
    order = sorted(lanes, key=lambda lane: (lane != COMPUTE, lane == COPIES, lane))
    resolution_s = timeline.seconds / _PIXELS
    longest = sorted(labels.items(), key=lambda item: -sum(item[1]))
    return {
        "name": timeline.name,
        "trips": timeline.trips,
        "seconds": timeline.seconds,
        "products": timeline.busy(PRODUCT, ATTENTION),
        "waits": timeline.busy(WAIT),
        "lanes": [
            {
                "name": lane,
                "busy": sum(s.seconds for s in lanes[lane] if s.kind != WAIT),
                "spans": [asdict(span) for span in merge(lanes[lane], resolution_s)],
            }
            for lane in order
        ],
        "longest": [
            {"label": label, "lane": lane, "times": len(s), "seconds": sum(s)}
            for (label, lane), s in longest[:_LONGEST]
        ],
    }


def merge(spans: Sequence[Span], resolution_s: float) -> list[Span]:
    """Join neighbours that nobody could tell apart, and drop what is too small to see.

    Several that are joined bear the name of the longest.

    Args:
        spans: of one lane, by their starts.
        resolution_s: the shortest time that shows.
    """
    groups, merged = list[list[Span]](), list[Span]()
    for span in spans:
        if groups and _alike(groups[-1][-1], span, resolution_s):
            groups[-1].append(span)
        else:
            groups.append([span])
    for group in groups:
        start_s, last = group[0].start_s, group[-1]
        longest = max(group, key=lambda span: span.seconds)
        more = [f"and {len(group) - 1} more"] if len(group) > 1 else []
        detail = ", ".join(filter(None, [longest.detail, *more]))
        seconds = last.start_s + last.seconds - start_s
        if seconds >= resolution_s / 4:
            joined = replace(longest, start_s=start_s, seconds=seconds, detail=detail)
            merged.append(joined)
    return merged


def _alike(last: Span, span: Span, resolution_s: float) -> bool:
    if span.start_s - last.start_s - last.seconds > resolution_s:
        return False
    longest, same_kind = max(last.seconds, span.seconds), last.kind == span.kind
    short = longest < (4 if same_kind else 1) * resolution_s
    return short or (same_kind and last.label == span.label)
