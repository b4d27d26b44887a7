"""FLOPs, against compiled steps."""

import pytest

from tests.train.compiled import SHAPE, B, D, L
from train.plan.estimated.step import estimate_step


@pytest.mark.parametrize(
    "name", ["ddp_full", "ddp_attention", "ddp_dots", "fsdp", "tensor_only", "local"]
)
def test_flops_are_those_of_the_compiled_step(stored_step, name):
    step = stored_step(name)
    fact, guess = step.cost, estimate_step(step.program)
    for compiled, estimated in zip(fact.sections, guess.sections, strict=True):
        assert estimated.name == compiled.name
        assert estimated.flops.products == compiled.flops.products
        assert estimated.flops.attention == compiled.flops.attention
        assert estimated.flops.whole_attention == compiled.flops.whole_attention


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


def test_a_stage_with_one_row_a_device_computes_half_of_what_two_rows_take(
    composed, lay_out
):
    """A kernel of one row has no dim for rows."""
    stages = "mesh=fsdp", "mesh.pipeline=2", "model.num_layers=2", "train.remat=none"
    one, two = (
        estimate_step(lay_out(composed(*SHAPE, *stages, rows), "h100-8")).flops
        for rows in ("data.batch_size=8", "data.batch_size=16")
    )
    assert one.attention * 2 == two.attention > 0
    assert one.whole_attention * 2 == two.whole_attention


EXPERTS = (
    *("model=mixtral_nano", "model.num_layers=1", "model.num_experts=8"),
    *("model.num_kv_heads=4", "model.vocab_size=512", "data.sequence_length=128"),
    *("data.batch_size=16", "mesh=fsdp_tensor", "optimizer=adamw", "tracker=none"),
)


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("expert", [1, 4])
def test_devices_together_compute_as_much_on_every_mesh_of_experts(
    composed, lay_out, expert, tensor
):
    def flops(*sizes):
        program = lay_out(composed(*EXPERTS, *sizes), "v5p-32")
        found = estimate_step(program).flops
        assert 0 < found.grouped < found.products
        return found.total * program.mesh.size

    found = flops(f"mesh.expert={expert}", f"mesh.tensor={tensor}")
    assert found == pytest.approx(flops("mesh.tensor=2"), rel=0.01)
