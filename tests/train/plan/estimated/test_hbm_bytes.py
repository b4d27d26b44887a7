"""Bytes by hand."""

import pytest

from tests.train.plan.estimated.test_local_step import D, F, V, share
from train.plan.estimated.hbm_bytes import movements

__all__ = ["share"]
BF16, F32, L, N, K, H, T = 2, 4, 4, 8, 4, 8, 128
TOKENS = 4 * T  # of a device
ATTENTION = 2 * D * N * H + 2 * D * K * H
MATRICES = ATTENTION + 3 * D * F  # of a layer
DIMS = 2 * (D + N * H) + 2 * (D + K * H) + 3 * (D + F)  # inputs and outputs of each
VALUES = 4 * D + 2 * (N + K) * H + 3 * F
KERNEL = ("mesh=ddp", "model.attention=splash")
PLENTY = 2**40


def moved(share, platform="gpu", muon=False, kept=0, core_memory=0):
    return movements(share, platform, muon, 0, kept, core_memory)


def test_a_product_reads_two_operands_and_writes_one_three_times(share):
    """Attention reads 2 (N + K) heads, and backward twice as many; then the head."""
    weights = (2 * BF16 + F32) * MATRICES
    heads = 6 * (N + K) * H * TOKENS * BF16
    tile = (2 * BF16 + 2 * F32) * V * D + TOKENS * V * (F32 + 2 * BF16)
    products = moved(share(*KERNEL)).products
    assert products == L * (3 * DIMS * TOKENS * BF16 + weights + heads) + tile


def test_full_repeats_all_products_but_the_last_and_dots_the_kernel(share):
    none, dots, full = (
        moved(share(*KERNEL, f"train.remat={remat}"))
        for remat in ("none", "dots", "full")
    )
    kernel = 2 * (N + K) * H * TOKENS * BF16
    assert dots.products - none.products == L * kernel
    again = (DIMS - F - D) * TOKENS * BF16 + (MATRICES - D * F) * BF16
    assert full.products - dots.products == L * again
    passes = (6 * D + 2 * (N + 2 * K) * H + 3 * F) * TOKENS * BF16
    assert dots.others - none.others == L * passes
    assert full.others - dots.others == L * (MATRICES - D * F) * BF16  # gathered again


@pytest.mark.parametrize(("platform", "times"), [("gpu", 4), ("tpu", 2)])
def test_what_is_kept_goes_into_a_stack_and_out_of_it(share, platform, times):
    twice = share("mesh=ddp", "train.accumulation_steps=2")
    more = moved(twice, platform, kept=1000).others - moved(twice, platform).others
    assert more == 2 * times * 1000


def test_values_that_fit_stay_in_the_core(share):
    """Each is written once and read once, forward and backward; no logits move."""
    cut = share(*KERNEL)
    far, near = moved(cut, "tpu"), moved(cut, "tpu", core_memory=PLENTY)
    logits = 3 * F32 * TOKENS * V
    assert far.products - near.products == L * 3 * DIMS * TOKENS * BF16 + logits
    again = moved(share(*KERNEL, "train.remat=dots"), "tpu", core_memory=PLENTY)
    assert again.others - near.others == L * 2 * VALUES * TOKENS * BF16


def test_half_of_the_core_must_hold_the_widest_value(share):
    cut, wide = share(*KERNEL), TOKENS * F * BF16
    none, just, more = (
        moved(cut, "tpu", core_memory=size).products
        for size in (0, 2 * wide, 2 * wide + 1)
    )
    assert none == just
    assert just - more == L * 3 * DIMS * TOKENS * BF16


def test_each_tile_of_logits_reads_the_head_and_adds_to_its_gradient(share):
    whole, tiles = (
        moved(share("mesh=ddp", f"train.loss_chunk_tokens={n}")) for n in (128, 64)
    )
    assert tiles.products - whole.products == 12 * V * D
    assert tiles.others == whole.others


@pytest.mark.parametrize(("platform", "each"), [("gpu", 26), ("tpu", 16)])
def test_logits_are_float32(share, platform, each):
    one, two = (
        moved(share("mesh=ddp", f"model.vocab_size={size}"), platform)
        for size in (V, 2 * V)
    )
    more = two.products + two.others - one.products - one.others
    head = 12 * V * D + 2 * F32 * V * D  # its gradient is read twice
    assert more == each * TOKENS * V + head


def test_plain_attention_moves_scores_and_kernels_do_not(share):
    plain, kernel = moved(share("mesh=ddp")), moved(share(*KERNEL))
    square = L * 4 * N * T * T * BF16
    assert plain.products - kernel.products == 6 * square
    assert plain.others - kernel.others == 5 * square


def test_muon_gathers_matrices_that_stay_cut(share):
    def extra(*overrides):
        cut = share(*overrides)
        with_muon, without = moved(cut, muon=True), moved(cut)
        return (
            with_muon.products - without.products,
            with_muon.others - without.others,
        )

    whole = L * MATRICES
    assert extra("mesh=ddp") == (5 * 8 * whole, 5 * 14 * whole)  # each does all
    products, others = extra("mesh=fsdp")  # eight devices do not divide four layers
    assert products == pytest.approx(5 * (4 + 4 / 8) * whole)
    assert others == pytest.approx(5 * (4 + 14 / 8) * whole)
