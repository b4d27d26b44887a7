"""Read the cost of a compiled step from the text of the optimized program."""

from train.plan.compiled.collectives import (
    list_collectives,
    sum_collectives,
    sum_outside_layers,
)
from train.plan.compiled.flops import count_flops
from train.plan.compiled.hbm_bytes import count_memory_traffic
from train.plan.compiled.trip_counts import read_module
from train.plan.cost import StepCost
from train.program import Program


def read_step(program: Program, text: str) -> StepCost:
    """Return the cost of a program's step, given its `compiled.as_text()`.

    Raises:
        ValueError: if the text is not an HLO module.
    """
    module = read_module(text)
    collectives = list_collectives(module, program.mesh)
    return StepCost(
        model_flops=program.flops_per_step / program.mesh.size,
        flops=count_flops(module),
        hbm_bytes=count_memory_traffic(module),
        sent=sum_collectives(collectives),
        outside_layers=sum_outside_layers(collectives),
        unread=tuple(module.unread),
    )
