"""Read the costs of a compiled step from the text of the optimized program."""

from train.plan.compiled.collectives import ledger, outside_layers, totals
from train.plan.compiled.flops import count_flops
from train.plan.compiled.hbm_bytes import count_hbm_bytes
from train.plan.compiled.trip_counts import read
from train.plan.cost import StepCost
from train.program import Program


def read_step(program: Program, text: str) -> StepCost:
    """Read a program's compiled step from `compiled.as_text()`.

    Raises:
        ValueError: if the text is not that of an HLO module.
    """
    module = read(text)
    collectives = ledger(module, program.mesh)
    return StepCost(
        model_flops=program.flops_per_step / program.mesh.size,
        flops=count_flops(module),
        hbm_bytes=count_hbm_bytes(module),
        sent=totals(collectives),
        outside_layers=outside_layers(collectives),
        unread=tuple(module.unread),
    )
