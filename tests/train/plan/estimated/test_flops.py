"""FLOPs by hand."""

import pytest

from tests.train.plan.estimated.test_local_step import D, F, V, share
from train.plan.estimated.flops import effort

__all__ = ["share"]
L, N, K, H, T = 4, 8, 4, 8, 128
MATRICES = 2 * D * N * H + 2 * D * K * H + 3 * D * F  # of a layer
TOKENS = 32 * T


def flops(share, muon=False):
    return effort(share, muon)


def test_plain_attention_is_six_products_and_two_again(share):
    """Of all devices; a matrix costs six FLOPs a token, one of a full repeat eight."""
    square = 2 * TOKENS * T * N * H * L
    for remat, squares, again in (
        ("none", 6, 0),
        ("dots", 8, 0),
        ("full", 8, 2 * L * (MATRICES - D * F)),
    ):
        cut = share("mesh=fsdp_tensor", "mesh.tensor=2", f"train.remat={remat}")
        each = 6 * (L * MATRICES + V * D) + again
        assert flops(cut).total * 8 == each * TOKENS + squares * square


def test_microbatches_change_no_flops(share):
    one, two = (
        flops(share("mesh=ddp", f"train.accumulation_steps={n}")) for n in (1, 2)
    )
    assert one.products == two.products


def test_tiles_of_logits_are_made_once(share):
    whole, tiles = (
        flops(share("mesh=ddp", f"train.loss_chunk_tokens={n}")) for n in (128, 64)
    )
    assert tiles.total == whole.total


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("mesh=ddp",), 1),  # eight devices do not divide four layers: each does all
        (("mesh=fsdp",), 8),  # cut along a side instead
        (("mesh=fsdp", "mesh.data=4"), 8),
    ],
)
def test_muon_orthogonalizes_its_part(share, overrides, part):
    def steps(short, long):
        return 5 * (4 * short**2 * long + 2 * short**3)

    cut = share(*overrides)
    layer = 2 * steps(64, 64) + 2 * steps(32, 64) + 3 * steps(64, 256)
    extra = flops(cut, muon=True).total - flops(cut).total
    assert extra == pytest.approx(L * layer / part)
