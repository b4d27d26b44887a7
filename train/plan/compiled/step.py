"""Read the cost of a compiled step from the text of the optimized program."""

from collections import defaultdict

from train.plan.compiled.attribution import scope_of
from train.plan.compiled.collectives import list_collectives, sum_collectives
from train.plan.compiled.flops import count_flops
from train.plan.compiled.hbm_bytes import count_memory_traffic
from train.plan.compiled.hlo import Executed
from train.plan.compiled.trip_counts import read_module
from train.plan.cost import SectionCost, StepCost
from train.plan.sections import SECTIONS, section_of
from train.program import Program


def read_step(program: Program, text: str) -> StepCost:
    """Return the cost of a program's step, given its `compiled.as_text()`.

    Raises:
        ValueError: if the text is not an HLO module.
    """
    module = read_module(text)
    collectives = list_collectives(module, program.mesh)
    by_section = defaultdict[str, list[Executed]](list)
    for executed in module.executed:
        scope = scope_of(executed, executed.instruction)
        by_section[section_of(scope)].append(executed)
    outside_layers = (c for c in collectives if not c.scope.startswith("layers"))
    sections = tuple(
        SectionCost(
            name,
            count_flops(by_section[name]),
            count_memory_traffic(by_section[name]),
            sum_collectives(c for c in collectives if section_of(c.scope) == name),
        )
        for name in SECTIONS
    )
    return StepCost(
        model_flops=program.flops_per_step / program.mesh.size,
        sections=sections,
        outside_layers=sum_collectives(outside_layers, by_use=True),
        unread=tuple(module.unread),
    )
