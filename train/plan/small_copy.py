"""Copy a program with two repeats of its layers, and extrapolate from it to all layers.

The layers are a loop over repeats of a pattern. Memory, FLOPs, bytes and collectives
are linear in the number of repeats. The walk over the traced program counts what each
repeat adds (estimated/), and the compiled copy supplies everything else.
"""

import math
from dataclasses import fields, replace
from typing import TypeVar

from train.plan.cost import CollectiveTotal, Flops, HbmBytes, SectionCost, StepCost
from train.plan.memory import DeviceMemory, Figure
from train.program import Program, make_program

EXTRAPOLATED = "extrapolated"
_REPEATS = 2
T = TypeVar("T", Flops, HbmBytes, CollectiveTotal)


def make_copy(program: Program) -> Program | None:
    """Return the program with two repeats of the pattern; None if it has no more."""
    model = program.config.model
    group = model.experts_every if model.expert_layers else 1
    period = math.lcm(len(model.layer_pattern or "1"), group)
    period *= program.pipeline.stages * program.pipeline.repeats
    depth = model.layers_before_experts + _REPEATS * period
    if depth >= model.num_layers:
        return None
    precise = tuple(
        layer
        for layer in model.high_precision_layers
        if isinstance(layer, str) or layer < depth
    )
    model = replace(model, num_layers=depth, high_precision_layers=precise)
    config = replace(program.config, model=model)
    devices = list(program.mesh.devices.flat)
    return make_program(config, devices, num_tokens=program.num_tokens)


def extrapolate_memory(
    copy: DeviceMemory, whole: DeviceMemory, temporaries: int
) -> DeviceMemory:
    """Return the memory of a whole step.

    Args:
        copy: the compiled memory of the copy.
        whole: the estimated memory of the whole step.
        temporaries: the bytes by which the temporaries of the step exceed the copy's.
    """
    arguments = whole.held - copy.held
    added = {"arguments": arguments, "temporaries": temporaries}
    parts = {
        name: Figure(part.bytes + added[name], EXTRAPOLATED)
        for name, part in copy.parts.items()
        if name in added
    }
    needed = copy.needed.bytes + arguments + temporaries
    return replace(
        whole, parts=whole.parts | parts, needed=Figure(needed, EXTRAPOLATED)
    )


def extrapolate_cost(
    copy: StepCost, copy_estimate: StepCost, whole: StepCost
) -> StepCost:
    """Return the cost of a whole step: that of the copy times the ratio of estimates.

    Args:
        copy: the compiled cost of the copy.
        copy_estimate: the estimated cost of the copy.
        whole: the estimated cost of the whole step.
    """
    sections = tuple(
        _extrapolate_section(*triple)
        for triple in zip(
            copy.sections, copy_estimate.sections, whole.sections, strict=True
        )
    )
    return replace(whole, sections=sections, unread=copy.unread, how=EXTRAPOLATED)


def _extrapolate_section(
    copy: SectionCost, copy_estimate: SectionCost, whole: SectionCost
) -> SectionCost:
    def ratio(after: float, before: float) -> float:
        return after / before if before else 1.0

    flops = ratio(whole.flops.total, copy_estimate.flops.total)
    hbm_bytes = ratio(whole.hbm_bytes.total, copy_estimate.hbm_bytes.total)
    sent_whole, sent_copy = (
        sum(total.sent for total in section.sent) for section in (whole, copy_estimate)
    )
    sent = ratio(sent_whole, sent_copy)
    return SectionCost(
        copy.name,
        _scale(copy.flops, flops, "unknown"),
        _scale(copy.hbm_bytes, hbm_bytes),
        [
            replace(
                total,
                count=round(total.count * sent),
                payload=round(total.payload * sent),
                sent=total.sent * sent,
            )
            for total in copy.sent
        ],
    )


def _scale(values: T, factor: float, *unscaled: str) -> T:
    names = [f.name for f in fields(values) if f.name not in unscaled]
    return replace(values, **{name: factor * getattr(values, name) for name in names})
