"""FLOPs follow formulas and agree across meshes; test_step.py has compiled ones."""

import pytest

from tests.train.compiled import SHAPE, B, D, L
from train.plan.estimated.step import estimate_step


@pytest.fixture
def count_flops(composed, lay_out):
    """Return the FLOPs of a step: (target, overrides) -> Flops."""

    def count_flops(target, overrides):
        overrides = [*SHAPE, "train.remat=none", *overrides]
        return estimate_step(lay_out(composed(overrides), target)).flops

    return count_flops


@pytest.mark.parametrize(
    "name", ["ddp_full", "ddp_attention", "ddp_dots", "fsdp", "tensor_only", "local"]
)
def test_flops_are_those_of_the_compiled_step(stored_step, name):
    """The text states the products; both take kernels' FLOPs from the estimate."""
    step = stored_step(name)
    for compiled, estimated in zip(
        step.cost.sections, estimate_step(step.program).sections, strict=True
    ):
        assert estimated.flops.products == compiled.flops.products


@pytest.mark.parametrize("context", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_ring_of_gpus_computes_the_scores_below_the_diagonal(count_flops, context):
    """A device computes half of its local T x T scores, and half of all remote ones.

    There are 2 products in the forward pass and 5 in the backward pass.
    """
    S = 4096
    sizes = (f"mesh.fsdp={8 // context}", f"mesh.context={context}")
    flops = count_flops("h100-8", ["mesh=fsdp", f"data.sequence_length={S}", *sizes])
    T = S // context
    product = 2 * L * B * T * D * context / 8  # the FLOPs of a device per key
    assert flops.attention == 7 * product * (T / 2 + (context - 1) * T / 2)
    assert flops.whole_attention == 7 * product * (T + (context - 1) * T / 2)


def test_layers_with_and_without_a_window_compute_their_own_scores(count_flops):
    """A kernel of each kind is traced, and a conditional chooses one for each layer."""
    shape = "mesh=ddp", "model.num_layers=4", "data.sequence_length=2048"

    def attention(pattern):
        window = () if pattern == "global" else ("model.window=300",)
        layers = f"model.layer_pattern=[{pattern}]"
        return count_flops("v5e-8", [*shape, *window, layers]).attention

    local_flops = attention("local")
    global_flops = attention("global")
    assert local_flops < global_flops
    assert attention("local,local,local,global") == (3 * local_flops + global_flops) / 4


def test_a_stage_with_one_row_computes_half_of_what_two_rows_take(count_flops):
    """A kernel of one row has no dim for rows."""
    stages = "mesh=fsdp", "mesh.pipeline=2", "model.num_layers=2"
    one = count_flops("h100-8", [*stages, "data.batch_size=8"])
    two = count_flops("h100-8", [*stages, "data.batch_size=16"])
    assert one.attention * 2 == two.attention > 0
    assert one.whole_attention * 2 == two.whole_attention


EXPERTS = (
    *("model=mixtral_nano", "model.num_layers=1", "model.num_experts=8"),
    *("model.num_kv_heads=4", "model.vocab_size=512", "data.sequence_length=128"),
    *("data.batch_size=16", "mesh=fsdp_tensor", "optimizer=adamw", "tracker=none"),
)


def test_a_tile_with_rows_of_two_experts_is_computed_twice(composed, lay_out):
    """16 x 4,096 tokens go to two of eight experts each, on eight chips.

    An expert has 2,048 rows on a chip, and tiles have 512 rows and columns.
    """
    overrides = (
        *("data.sequence_length=4096", "model.max_sequence_length=4096"),
        *("model.embed_dim=512", "model.expert_dim=640", "mesh=fsdp"),
    )
    flops = estimate_step(lay_out(composed([*EXPERTS, *overrides]), "v5e-8")).flops
    shared = 1 + 7 * 512 / (2 * 2 * 4096)
    assert flops.grouped_tiles == pytest.approx(flops.grouped * shared * 1024 / 640)


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("expert", [1, 4])
def test_devices_together_compute_the_same_on_every_mesh_of_experts(
    composed, lay_out, expert, tensor
):
    def total_flops(*sizes):
        program = lay_out(composed([*EXPERTS, *sizes]), "v5p-32")
        counts = estimate_step(program).flops
        assert 0 < counts.grouped < counts.products
        return counts.total * program.mesh.size

    total = total_flops(f"mesh.expert={expert}", f"mesh.tensor={tensor}")
    assert total == pytest.approx(total_flops("mesh.tensor=2"), rel=0.01)
