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
from train.program import Program


def read_step(
    program: Program, text: str, estimated_flops: Mapping[str, Flops]
) -> StepCost:
    """Return the cost of a program's step.

    Args:
        program: the program.
        text: the result of its `compiled.as_text()`.
        estimated_flops: the estimated FLOPs by section (train/plan/estimated), which
            supply the FLOPs of kernels.

    Raises:
        ValueError: if the text is not an HLO module.
    """
    module = read_module(text, program.config.model)
    collectives = list_collectives(module, program.mesh)
    by_section = defaultdict[str, list[Executed]](list)
    for executed in module.executed:
        scope = scope_of(executed, executed.instruction)
        by_section[section_of(scope)].append(executed)
    has_attention = any(
        is_attention(inner)
        for executed in module.executed
        for inner in executed.instruction.with_nested
    )
    outside_layers = (c for c in collectives if not c.scope.startswith("layers"))
    sections = list[SectionCost]()
    for name in SECTIONS:
        estimated = estimated_flops.get(name, Flops())
        if not has_attention:
            estimated = replace(estimated, attention=0.0, whole_attention=0.0)
        section = SectionCost(
            name,
            _count_with_kernels(by_section[name], estimated),
            count_memory_traffic(by_section[name]),
            sum_collectives(c for c in collectives if section_of(c.scope) == name),
        )
        sections.append(section)
    return StepCost(
        model_flops=program.flops_per_step / program.mesh.size,
        sections=tuple(sections),
        outside_layers=sum_collectives(outside_layers, by_use=True),
        unread=tuple(module.unread),
    )


def _count_with_kernels(all_executed: Sequence[Executed], estimated: Flops) -> Flops:
    """Count the FLOPs of a section, of which the estimate supplies those of kernels.

    Idle rows and columns of matrix units are assumed to be the same fraction of all
    products as in the estimate.
    """
    nested = (executed.instruction.with_nested for executed in all_executed)
    grouped_kernels = [i for inner in nested for i in inner if is_grouped(i)]
    grouped = estimated.grouped if grouped_kernels else 0.0
    in_eight_bits = grouped if all(map(has_eight_bits, grouped_kernels)) else 0.0
    found = count_flops(all_executed)
    products = found.products + grouped
    scale = products / estimated.products if estimated.products else 0.0
    return replace(
        found,
        products=products,
        attention=estimated.attention,
        whole_attention=estimated.whole_attention,
        eight_bits=found.eight_bits + in_eight_bits,
        grouped=grouped,
        padded=scale * estimated.padded,
    )
