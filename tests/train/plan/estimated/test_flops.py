"""FLOPs, against compiled steps."""

import pytest

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
