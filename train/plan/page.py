"""Collect the data of the plan's page, an HTML file that works without a network.

The template `plan.html` in this folder draws the page from `plan.json`: the plan's
figures, the timelines of one layer, and how arrays are sharded.
"""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from train.cli.schema import config_yaml
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
_PIXELS = 1000  # assumed width of a timeline
_MAX_LABELS = 8  # labels listed for each timeline


def page_data(
    program: Program,
    module: Module | None,
    summary: Sequence[tuple[str, str]],
    command: Sequence[str],
) -> dict[str, Any]:
    """Return what the page shows in addition to the plan's figures, as plain values.

    Args:
        program: the program on the planned devices.
        module: the compiled step; None if the step was not compiled.
        summary: titles and sentences about the predicted speed.
        command: the command-line arguments that reproduce this plan.
    """
    data = program.config.data
    return {
        "rows": data.batch_size,
        "sequence_length": data.sequence_length,
        "summary": summary,
        "command": shlex.join(["python", "-m", "train.plan", *command]),
        "config": config_yaml(program.config),
        "layers": layers_data(program, module),
        "layout": layout_data(program),
    }


def layers_data(program: Program, module: Module | None) -> dict[str, Any]:
    """Return the timelines of a layer and the rates that determine them.

    Returns:
        missing: the reason why there are no timelines, or "".
        flops: the rate of products, in FLOP/s.
        memory: the rate of main memory, in bytes/s.
        passes: `pass_data` of each timeline.
    """
    chip = chip_of(program.mesh.devices.flat[0].device_kind)
    if module is None:
        return {"missing": "There is no compiled step whose schedule could be shown."}
    if chip is None:
        return {"missing": "Not drawn: the rates of this machine are not known."}
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
    """Return the lanes of a timeline; spans that are too short to see are merged.

    `longest` lists the labels whose spans take the most time in total.
    """
    lanes, labels = defaultdict(list), defaultdict(list)
    for span in timeline.spans:
        lanes[span.lane].append(span)
        labels[span.label, span.lane].append(span.seconds)
    lane_names = sorted(lanes, key=lambda lane: (lane != COMPUTE, lane == COPIES, lane))
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
            for lane in lane_names
        ],
        "longest": [
            {"label": label, "lane": lane, "times": len(s), "seconds": sum(s)}
            for (label, lane), s in longest[:_MAX_LABELS]
        ],
    }


def merge(spans: Sequence[Span], resolution_s: float) -> list[Span]:
    """Join adjacent spans that are drawn as one, and drop spans too short to see.

    A joined span has the label of the longest span in it.

    Args:
        spans: the spans of one lane, sorted by start.
        resolution_s: the shortest visible time.
    """
    groups, merged = list[list[Span]](), list[Span]()
    for span in spans:
        if groups and _can_join(groups[-1][-1], span, resolution_s):
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


def _can_join(last: Span, span: Span, resolution_s: float) -> bool:
    if span.start_s - last.start_s - last.seconds > resolution_s:
        return False
    same_kind = last.kind == span.kind
    shortest_visible_s = (4 if same_kind else 1) * resolution_s
    if max(last.seconds, span.seconds) < shortest_visible_s:
        return True
    return same_kind and last.label == span.label
