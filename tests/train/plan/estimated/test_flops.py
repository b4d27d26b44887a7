"""FLOPs, against compiled steps."""

import pytest

from tests.train.compiled import SHAPE, B, D, L
from train.plan.compiled import flops as compiled
from train.plan.estimated.step import estimate_step


@pytest.mark.parametrize(
    "name", ["ddp_full", "ddp_attention", "ddp_dots", "fsdp", "tensor_only", "local"]
)
def test_flops_are_those_of_the_compiled_step(stored_step, name):
    step = stored_step(name)
    fact, guess = compiled.count_flops(step.module), estimate_step(step.program).flops
    assert guess.products == fact.products
    assert guess.attention == fact.attention
    assert guess.whole_attention == fact.whole_attention


@pytest.mark.parametrize("context", [1, 2, 4])
def test_a_ring_of_gpus_computes_what_is_below_the_diagonal(composed, lay_out, context):
    """Half of its own T x T scores, and all that it sees of another device's keys, half
    of as many: 2 products forward, 5 backward."""
    S, sizes = 2048, (f"mesh.fsdp={8 // context}", f"mesh.context={context}")
    more = ("mesh=fsdp", f"data.sequence_length={S}", "train.remat=none", *sizes)
    program = lay_out(composed(*SHAPE, *more), "h100-8")
    found, T = estimate_step(program).flops, S // context
    product = 2 * L * B * T * D * context / 8  # by each device, over one of T keys
    assert found.attention == 7 * product * (T / 2 + (context - 1) * T / 2)
    assert found.whole_attention == 7 * product * (T + (context - 1) * T / 2)
