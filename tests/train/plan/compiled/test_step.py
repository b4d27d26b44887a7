"""A compiled step falls into sections, and nothing is lost or counted twice."""

import pytest

from tests.train.compiled import B, D, T, V
from train.plan.compiled.collectives import sum_collectives
from train.plan.compiled.flops import count_flops
from train.plan.compiled.hbm_bytes import count_memory_traffic
from train.plan.compiled.step import read_step


@pytest.mark.parametrize("name", ["fsdp", "fsdp_tiles", "tensor", "slices", "rings"])
def test_sections_add_up_to_the_whole_program(stored_step, name):
    step = stored_step(name)
    cost, instructions = read_step(step.program, step.text), step.module.executed
    assert cost.flops == count_flops(instructions)
    assert cost.hbm_bytes == count_memory_traffic(instructions)
    sent = {(t.axes, t.network, t.kind, t.links): t for t in cost.sent}
    for total in sum_collectives(step.collectives):
        found = sent.pop((total.axes, total.network, total.kind, total.links))
        assert (found.count, found.payload) == (total.count, total.payload)
        assert found.sent == pytest.approx(total.sent, rel=1e-12)
        assert found.overlapped == pytest.approx(total.overlapped, rel=1e-12)
    assert not sent


@pytest.mark.parametrize("name", ["fsdp", "fsdp_tiles"])
def test_the_loss_has_the_products_of_the_head_in_one_tile_or_several(
    stored_step, name
):
    step = stored_step(name)
    sections = {s.name: s for s in read_step(step.program, step.text).sections}
    head = 3 * 2 * B * T * D * V / step.program.mesh.size
    assert sections["loss"].flops.products == head
    assert sections["embedding and update"].flops.total == 0
    assert sections["embedding and update"].hbm_bytes.others > 0
