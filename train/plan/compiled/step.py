"""Read the cost of a compiled step from the text of the optimized program."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from train.plan.compiled.attribution import scope_of
from train.plan.compiled.collectives import list_collectives, sum_collectives
from train.plan.compiled.flops import (
    count_flops,
    has_eight_bits,
    is_attention,
    is_grouped,
)
from train.plan.compiled.hbm_bytes import count_memory_traffic
from train.plan.compiled.hlo import Executed
from train.plan.compiled.trip_counts import read_module
from train.plan.cost import Flops, SectionCost, StepCost
from train.plan.sections import SECTIONS, section_of
from train.resolve.program import ConfiguredProgram


def read_step(
    program: ConfiguredProgram, text: str, estimated_flops: Mapping[str, Flops]
) -> StepCost:
    """Return the cost of a program's step, given its `compiled.as_text()`.

    `estimated_flops` are the FLOPs by section that train/plan/estimated counts. They
    supply the FLOPs of kernels, which the text does not state.

    Raises:
        ValueError: if the text is not an HLO module.
    """
    module = read_module(text, program.config.model)
    collectives = list_collectives(module, program.mesh)
    by_section = defaultdict[str, list[Executed]](list)
    for executed in module.executed:
        scope = scope_of(executed, executed.instruction)
        by_section[section_of(scope)].append(executed)
    outside_layers = (c for c in collectives if not c.scope.startswith("layers"))
    sections = list[SectionCost]()
    for name in SECTIONS:
        estimated = estimated_flops.get(name, Flops())
        flops = _add_kernels(by_section[name], estimated)
        traffic = count_memory_traffic(by_section[name])
        sent = sum_collectives(c for c in collectives if section_of(c.scope) == name)
        sections.append(SectionCost(name, flops, traffic, sent))
    return StepCost(
        model_flops=program.flops_per_step / program.mesh.size,
        sections=tuple(sections),
        outside_layers=sum_collectives(outside_layers, by_use=True),
        unread=tuple(module.unread),
    )


def _add_kernels(all_executed: Sequence[Executed], estimated: Flops) -> Flops:
    """Count the FLOPs of products, and add those of attention and grouped kernels.

    The idle rows and columns of matrix units are the same fraction as in the estimate.
    """
    instructions = [i for e in all_executed for i in e.instruction.with_nested]
    has_attention = any(map(is_attention, instructions))
    grouped_kernels = list(filter(is_grouped, instructions))
    grouped = estimated.grouped if grouped_kernels else 0.0
    kernels = Flops(
        products=grouped,
        attention=estimated.attention if has_attention else 0.0,
        whole_attention=estimated.whole_attention if has_attention else 0.0,
        eight_bits=grouped if all(map(has_eight_bits, grouped_kernels)) else 0.0,
        grouped=grouped,
        grouped_tiles=estimated.grouped_tiles if grouped_kernels else 0.0,
    )
    total = count_flops(all_executed) + kernels
    padding = estimated.padded / estimated.total if estimated.total else 0.0
    return replace(total, padded=padding * total.total)
