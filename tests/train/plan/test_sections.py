"""The name of an operation decides to which section of a step it belongs."""

import pytest

from train.plan.estimated.step import estimate_step
from train.plan.sections import SECTIONS, scope_in_name, section_of

FORWARD, LOSS, BACKWARD, OTHERS = SECTIONS
SHAPE = (
    *("model=gpt2_124m", "data.sequence_length=1024", "model.vocab_size=65536"),
    *("optimizer=adamw", "tracker=none", "train.remat=full", "mesh=fsdp"),
)


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("jit(step)/jvp(layers)/while/body/part.mlp/dot_general", FORWARD),
        ("jit(step)/transpose(jvp(layers))/while/body/rematted/dot", BACKWARD),
        ("/transpose(jvp(layers))", BACKWARD),
        ("/jvp(stages)/layers/part.mlp/part.up", FORWARD),
        ("/transpose(jvp(stages))/layers/part.mlp/part.up", BACKWARD),
        ("jit(step)/transpose(jvp(stages))/while/body/part.pipeline/add", BACKWARD),
        ("/jvp(loss)/part.head/transpose(jvp(btv,vd->btd))", LOSS),
        ("jit(step)/microbatches/while/body/transpose(jvp(loss))/mul", LOSS),
        ("jit(step)/microbatches/while/body/add", OTHERS),
        ("jit(step)/optimizer/layers_norm/mul", OTHERS),
        ("", OTHERS),
    ],
)
def test_a_scope_decides_the_section(name, section):
    assert section_of(scope_in_name(name)) == section


def test_microbatches_are_added_up(composed, lay_out):
    """Four microbatches take the FLOPs of one batch, and more memory traffic."""
    base = (*SHAPE, "data.batch_size=64")
    microbatches = (*base, "train.accumulation_steps=4")
    one = estimate_step(lay_out(composed(base), "v5e-8"))
    four = estimate_step(lay_out(composed(microbatches), "v5e-8"))
    for a, b in zip(one.sections, four.sections, strict=True):
        assert b.flops == a.flops
        assert b.hbm_bytes.total > a.hbm_bytes.total


def test_stages_count_as_layers(composed, lay_out):
    """All iterations of a device count, and so do transfers between stages."""
    stages = (*SHAPE, "mesh.pipeline=2", "data.batch_size=16")
    cost = estimate_step(lay_out(composed(stages), "v5e-8"))
    sections = {section.name: section for section in cost.sections}
    for name in (FORWARD, BACKWARD):
        assert sections[name].flops.total > 0
        assert "collective-permute" in {total.kind for total in sections[name].sent}
    assert sections[OTHERS].flops.total == 0
    assert sum(section.flops.total for section in cost.sections) == cost.flops.total
