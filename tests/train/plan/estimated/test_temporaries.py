"""Bytes by hand."""

import math

import pytest

from tests.train.plan.estimated.test_local_step import D, F, V, share
from train.plan.estimated.temporaries import saved_bytes, temporaries, tiled

__all__ = ["share"]
BF16, F32, L = 2, 4, 4
SPLASH = ("mesh=ddp", "model.attention=splash", "data.batch_size=1024")


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        ((8, 128), 8 * 128),
        ((3, 130), 4 * 256),  # few rows take a smaller tile
        ((9, 128), 16 * 128),
        ((1024, 12, 64), 1024 * 12 * 64),  # the longest dim may be the minor one
        ((5, 7), 8 * 128),
        ((300,), 300),
    ],
)
def test_tiles_pad_the_two_minor_dims(shape, padded):
    assert tiled(shape, F32, "tpu") == F32 * padded
    assert tiled(shape, F32, "gpu") == F32 * math.prod(shape)


def test_full_recomputation_saves_the_inputs_of_the_layers(share):
    cut = share("mesh=ddp", "train.remat=full")
    assert saved_bytes(cut, "gpu") == L * BF16 * cut.tokens * D


def test_large_logits_make_the_peak(share):
    tile = 128
    cut = share("mesh=fsdp", "train.remat=full", "model.vocab_size=65536")
    items = temporaries(cut, "gpu", muon=False)
    assert cut.tile == tile
    assert items["logits of a tile"] == (F32 + BF16) * cut.rows * tile * 65536
    assert items["rounded head"] == BF16 * 65536 * D
    assert items["head's gradient"] == F32 * 65536 * D


def test_microbatches_cost_a_second_gradient_and_spare_activations(share):
    once = temporaries(share("mesh=ddp"), "gpu", muon=False)
    twice = temporaries(share("mesh=ddp", "train.accumulation_steps=2"), "gpu", False)
    assert 2 * twice["saved activations"] == once["saved activations"]
    params = L * (D * 8 * 8 * 2 + D * 4 * 8 * 2 + 3 * D * F + 2 * D) + V * D + D
    assert twice["sum over microbatches"] == F32 * params


def test_only_tpus_round_all_layers_at_once(share):
    matrices = D * 8 * 8 * 2 + D * 4 * 8 * 2 + 3 * D * F
    cut = share("mesh=ddp", "data.batch_size=1024")
    rounded = temporaries(cut, "tpu", False)["rounded weights"]
    assert BF16 * L * matrices <= rounded <= 2 * BF16 * L * matrices  # narrow: padded
    assert "rounded weights" not in temporaries(cut, "gpu", False)


def test_behind_the_loss_the_heads_gradient_waits_for_the_loop_over_the_layers(share):
    """Of the others there are those of the layers, cut; of the embedding none yet."""
    untied = ("mesh=fsdp", "model.tied_head=false", "data.batch_size=1024")
    items = temporaries(share(*untied), "gpu", muon=False)
    layers = D * 8 * 8 * 2 + D * 4 * 8 * 2 + 3 * D * F + 2 * D
    assert items["gradients"] == F32 * L * layers / 8
    assert items["head's gradient"] == F32 * V * D


def test_only_tpus_gather_the_next_layers_weights_meanwhile(share):
    matrices = D * 8 * 8 * 2 + D * 4 * 8 * 2 + 3 * D * F
    cut = share("mesh=fsdp", "data.batch_size=1024")
    for platform, times in (("tpu", 2), ("gpu", 1)):
        items = temporaries(cut, platform, False)
        assert items["gathered weights"] == times * BF16 * matrices
        assert items["gradients to scatter"] == F32 * matrices


@pytest.mark.parametrize(("activation", "wide"), [("swiglu", 3), ("gelu", 2)])
def test_recomputation_holds_one_more_wide_array_and_attention(share, activation, wide):
    """And three more of features; with a wide MLP, which is where it needs most."""
    wide_mlp = 2048

    def one_layer(remat):
        overrides = (f"model.activation={activation}", f"train.remat={remat}")
        cut = share(*overrides, *SPLASH, f"model.mlp_dim={wide_mlp}")
        return cut, temporaries(cut, "gpu", False)["one layer"]

    cut, none = one_layer("none")
    hidden = BF16 * cut.tokens * D
    heads = BF16 * cut.tokens * 2 * (8 + 4) * 128  # a head's lanes are padded
    array = BF16 * cut.tokens * wide_mlp
    assert none == wide * array + 2 * hidden
    for remat in ("dots", "full"):
        assert one_layer(remat)[1] == (wide + 1) * array + heads + 5 * hidden


def test_muon_holds_whole_matrices_of_its_layers(share):
    shape = ("mesh=ddp", "model.num_layers=8", "train.remat=full")
    cut = share(
        *shape, "model.mlp_dim=16384", "data.sequence_length=8", "data.batch_size=8"
    )
    items = temporaries(cut, "gpu", muon=True)
    assert cut.spread == ("data",)  # each device one layer
    assert items["Muon's matrices"] == (2 * F32 + BF16) * D * 16384 + (
        (F32 + BF16) * D * D
    )
    assert "saved activations" not in items  # they are gone by then
