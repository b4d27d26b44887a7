"""A compiled step falls into sections, and nothing is lost or counted twice."""

import dataclasses

import pytest

from tests.train.compiled import in_one
from train.plan.compiled.collectives import sum_collectives
from train.plan.compiled.flops import count_flops
from train.plan.compiled.hbm_bytes import count_memory_traffic
from train.plan.compiled.step import read_step
from train.plan.cost import Flops

FORWARD = "layers forward"
SPLASH = 'custom_call_target="tpu_custom_call", metadata={op_name="'
SPLASH += 'jvp(layers)/splash_mha_fwd"}'


@pytest.mark.parametrize("name", ["fsdp", "fsdp_tiles", "tensor", "slices"])
def test_sections_add_up_to_the_whole_program(stored_step, name):
    step = stored_step(name)
    cost = read_step(step.program, step.text, {})
    instructions = step.module.executed
    assert cost.flops == count_flops(instructions)
    assert cost.hbm_bytes == count_memory_traffic(instructions)
    totals = {(t.axes, t.network, t.kind, t.links): t for t in cost.sent}
    for total in sum_collectives(step.collectives):
        row = totals.pop((total.axes, total.network, total.kind, total.links))
        assert (row.count, row.payload) == (total.count, total.payload)
        assert row.sent == pytest.approx(total.sent, rel=1e-12)
        assert row.overlapped == pytest.approx(total.overlapped, rel=1e-12)
    assert not totals


@pytest.mark.parametrize(("dtype", "eight_bits"), [("bf16", 20), ("f8e4m3fn", 320)])
def test_the_estimate_supplies_the_flops_of_kernels(stored_step, dtype, eight_bits):
    """Padding is the same fraction of compiled FLOPs as of estimated FLOPs."""
    text = in_one(
        "  %s = s32[4] parameter(0)\n"
        f"  %x = {dtype}[8,4] parameter(1)\n"
        f"  %w = {dtype}[4,4,2] parameter(2)\n"
        '  %g = f32[8,2] custom-call(%s, %x, %w), custom_call_target="tpu_custom_call"'
        ', metadata={op_name="jvp(layers)/jit(grouped_rows)/gmm"}\n'
        "  %a = s8[1,5] parameter(3)\n"
        "  %b = s8[5,2] parameter(4)\n"
        "  %d = s32[1,2] dot(%a, %b), lhs_contracting_dims={1}, "
        'rhs_contracting_dims={0}, metadata={op_name="jvp(layers)/dot"}\n'
        f"  ROOT %k = f32[8] custom-call(%x), {SPLASH}"
    )
    estimate = Flops(640.0, 7.0, 9.0, eight_bits=1.0, grouped=300.0, padded=1000.0)
    program = stored_step("ddp").program

    def read(text: str) -> Flops:
        return read_step(program, text, {FORWARD: estimate}).sections[0].flops

    flops = read(text)
    assert flops.padded == pytest.approx(1000 * 327 / 647)
    assert dataclasses.replace(flops, padded=0.0) == Flops(
        320.0, 7.0, 9.0, eight_bits=eight_bits, grouped=300.0
    )
    without_attention = read(text.replace(SPLASH, 'custom_call_target="Sharding"'))
    assert without_attention.attention == without_attention.whole_attention == 0
    assert read(text.replace("(grouped_rows)", "(rows)")).grouped == 0
