"""FLOPs and bytes of a compiled step."""

import pytest

from tests.train.compiled import DOWN, MATRICES, B, D, F, L, T, V, in_one
from train.plan.compiled.flops import count_flops, product_flops
from train.plan.compiled.hlo import parse
from train.plan.compiled.trip_counts import read_module

TOKENS = B * T
ALL = ("full", "attention")  # products of a layer are recomputed
FORWARD, BACKWARD = 2, 7  # products over [T, S] that splash makes
ATTENTION = 2 * L * T * D * TOKENS  # FLOPs of one of them


KEYS = D * D  # of a layer: half as many heads leave half of keys and values


@pytest.mark.parametrize(
    ("name", "matrices", "remat", "ratio"),
    [
        ("ddp", MATRICES, "none", 1.079),
        ("ddp_dots", MATRICES, "dots", 1.132),
        ("ddp_full", MATRICES, "full", 1.342),
        ("ddp_attention", MATRICES, "attention", 1.289),
        ("shared_heads", MATRICES - KEYS, "none", 1.086),
        ("gpt2_full", 4 * D * D + 2 * D * F, "full", 1.344),
    ],
)
def test_executed_flops_are_those_derived_by_hand(
    stored_step, name, matrices, remat, ratio
):
    """The embedding is looked up, for nothing; the head multiplies, tied or not.

    Recomputed: attention, and with `full` all of a layer but its last product, whose
    result is only added: the backward pass does not need it. Attention that is kept
    leaves the other products of `full`.
    """
    step = stored_step(name)
    done, chips = count_flops(step.module.executed), step.program.mesh.size
    products = 6 * (L * matrices + V * D) * TOKENS
    products += 2 * L * (matrices - DOWN) * TOKENS if remat in ALL else 0
    assert done.products * chips == products
    kernels = BACKWARD + FORWARD * (2 if remat in ("dots", "full") else 1)
    assert done.whole_attention * chips == kernels * ATTENTION
    assert done.attention == done.whole_attention  # a single block has no other above
    model_flops = 6 * (L * matrices + V * D) * TOKENS + 6 * ATTENTION
    assert step.program.flops_per_step == model_flops
    by_hand = (products + kernels * ATTENTION) / model_flops
    assert done.total * chips / model_flops == pytest.approx(by_hand)
    assert by_hand == pytest.approx(ratio, abs=0.001)
    assert done.unknown == ()


def test_a_window_leaves_blocks_out(stored_step):
    """Of 4 x 4 blocks a global layer computes 10, a local one of 300 keys 7."""
    step, tokens, length = stored_step("local"), 8 * TOKENS, 2048
    done, chips = count_flops(step.module.executed), step.program.mesh.size
    layer = (FORWARD + BACKWARD) * 2 * length * D * tokens
    assert done.whole_attention * chips == L * layer
    assert done.attention * chips == (2 * 7 + 10) / 16 * layer
    keys = 2 * 300 + length
    assert step.program.flops_per_step == tokens * (
        6 * (L * MATRICES + V * D) + 12 * keys * D
    )


@pytest.mark.parametrize("mesh", ["mesh=ddp", "mesh=fsdp"])
def test_on_a_cpu_attention_is_products_in_blocks_of_queries(compile_step, mesh):
    """Of two, the first meets half of the keys; a model's FLOPs are of all."""
    step = compile_step(mesh, "model.compute_dtype=float32")
    done = count_flops(step.module.executed)
    hidden = 6 * ATTENTION / 4
    assert done.products * 8 == step.program.flops_per_step - hidden
    assert done.attention == 0


def test_a_batched_product_of_a_tpu_counts_without_its_padding():
    text = in_one(
        "  %a = bf16[2,1024,2,64,1] parameter(0)\n"
        "  %b = bf16[2,64,8,64,1] parameter(1)\n"
        "  ROOT %c = bf16[2,1024,8,64,1] convolution(%a, %b), "
        "window={size=1x8x2 pad=0_0x7_7x0_0 rhs_reversal=0x1x0}, "
        "dim_labels=0b2f1_2i1o0->0b1f2"
    )
    assert product_flops(parse(text).entry.root) == 2 * (2 * 1024) * (2 * 64) * (8 * 64)


def test_zeros_between_the_inputs_do_not_count():
    text = in_one(
        "  %a = f32[1,3,4] parameter(0)\n"
        "  %b = f32[2,4,8] parameter(1)\n"
        "  ROOT %c = f32[1,4,8] convolution(%a, %b), "
        "window={size=2 lhs_dilate=2}, dim_labels=b0f_0io->b0f"
    )
    assert product_flops(parse(text).entry.root) == 2 * 4 * (
        4 * 8
    )  # each of the four windows holds one input


@pytest.mark.parametrize(
    ("left", "right", "eight"),
    [("f8e5m2", "f8e4m3fn", True), ("s8", "s8", True), ("bf16", "f8e4m3fn", False)],
)
def test_products_of_eight_bits_count_apart(left, right, eight):
    text = in_one(
        f"  %a = {left}[16,64] parameter(0)\n"
        f"  %b = {right}[64,32] parameter(1)\n"
        "  ROOT %c = f32[16,32] dot(%a, %b), "
        "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    done = count_flops(read_module(text).executed)
    assert done.products == 2 * 16 * 64 * 32
    assert done.eight_bits == (done.products if eight else 0)


def test_cublas_is_read():
    text = in_one(
        "  %a = f8e4m3fn[16,64] parameter(0)\n"
        "  %b = f8e4m3fn[32,64] parameter(1)\n"
        "  ROOT %c = (bf16[16,32], s8[1024]) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul$f8", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}'
    )
    done = count_flops(read_module(text).executed)
    assert done.products == done.eight_bits == 2 * 16 * 64 * 32
    assert done.unknown == ()


@pytest.mark.parametrize(
    ("queries", "keys"), [("2,64,4,8", "2,32,2,8"), ("2,4,64,8", "2,2,32,8")]
)
@pytest.mark.parametrize(("mask", "part"), [("NO_MASK", 1), ("CAUSAL", 1 / 2)])
def test_cudnn_may_have_heads_before_positions(queries, keys, mask, part):
    """As in a ring: 64 queries of 4 heads, 32 keys of 2 heads."""
    text = in_one(
        f"  %q = bf16[{queries}] parameter(0)\n"
        f"  %k = bf16[{keys}] parameter(1)\n"
        f"  %v = bf16[{keys}] parameter(2)\n"
        "  ROOT %o = (bf16[2,4,64,8], f32[2,4,64], u8[0]) custom-call(%q, %k, %v), "
        'custom_call_target="__cudnn$fmhaSoftmax", backend_config={'
        '"operation_queue_id": "0", "cudnn_fmha_backend_config": {'
        '"algorithm": {"tuning_knobs": {"17": "1"}}, "fmha_scale": 1.0, '
        '"intermediate_tensor_shape": {"element_type": "BF16", '
        '"dimensions": ["2", "4", "64", "32"], "tuple_shapes": []}, '
        f'"is_flash_attention": true, "mask_type": "{mask}", '
        '"sliding_window_length": 0}}'
    )
    done = count_flops(read_module(text).executed)
    assert done.whole_attention == 2 * 2 * (2 * 4 * 64 * 32) * 8
    assert done.attention == part * done.whole_attention
    assert done.unknown == ()


def test_products_of_rows_grouped_by_expert_count_apart():
    """Of the rows in use, and not with the dense product next to them."""
    text = in_one(
        "  %x = bf16[96,64] parameter(0)\n"
        "  %w = bf16[4,64,32] parameter(1)\n"
        "  %d = bf16[64,8] parameter(2)\n"
        "  %y = f32[96,8] dot(%x, %d), "
        "lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  ROOT %g = bf16[96,32] custom-call(%x, %w), "
        'custom_call_target="tpu_custom_call", '
        'metadata={op_name="jit(step)/expected.64.96/(grouped_rows)"}'
    )
    done = count_flops(read_module(text).executed)
    assert done.grouped == 2 * 64 * 64 * 32
    assert done.products == done.grouped + 2 * 96 * 64 * 8
