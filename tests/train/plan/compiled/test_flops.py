"""The FLOPs of a compiled step's products are counted."""

import pytest

from tests.train.compiled import DOWN, MATRICES, B, D, F, L, T, V, in_one
from train.plan.compiled.flops import count_flops, is_kernel, product_flops
from train.plan.compiled.hlo import parse
from train.plan.compiled.trip_counts import read_module

TOKENS = B * T
KEYS = D * D  # Half as many heads save half of a layer's keys and values.


@pytest.mark.parametrize(
    ("name", "matrices", "recomputes"),
    [
        ("ddp", MATRICES, False),
        ("ddp_dots", MATRICES, False),
        ("ddp_full", MATRICES, True),
        ("ddp_attention", MATRICES, True),
        ("shared_heads", MATRICES - KEYS, False),
        ("gpt2_full", 4 * D * D + 2 * D * F, True),
    ],
)
def test_products_are_those_of_a_formula(stored_step, name, matrices, recomputes):
    """Looking up the embedding costs no FLOPs; the head is a product, tied or not.

    All of a layer but its last product is recomputed, because the backward pass does
    not need the result of that product.
    """
    step = stored_step(name)
    flops = count_flops(step.module.executed)
    chips = step.program.mesh.size
    products = 6 * (L * matrices + V * D) * TOKENS
    products += 2 * L * (matrices - DOWN) * TOKENS * recomputes
    assert flops.products * chips == products
    assert flops.unknown == ()


def test_a_batched_product_of_a_tpu_counts_without_its_padding():
    text = in_one(
        "  %a = bf16[2,1024,2,64,1] parameter(0)\n"
        "  %b = bf16[2,64,8,64,1] parameter(1)\n"
        "  ROOT %c = bf16[2,1024,8,64,1] convolution(%a, %b), "
        "window={size=1x8x2 pad=0_0x7_7x0_0 rhs_reversal=0x1x0}, "
        "dim_labels=0b2f1_2i1o0->0b1f2"
    )
    assert product_flops(parse(text).entry.root) == 2 * (2 * 1024) * (2 * 64) * (8 * 64)


def test_a_product_of_cublas_is_counted():
    text = in_one(
        "  %a = f8e4m3fn[16,64] parameter(0)\n"
        "  %b = f8e4m3fn[32,64] parameter(1)\n"
        "  ROOT %c = (bf16[16,32], s8[1024]) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul$f8", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}'
    )
    flops = count_flops(read_module(text).executed)
    assert flops.products == flops.eight_bits == 2 * 16 * 64 * 32
    assert flops.unknown == ()


@pytest.mark.parametrize(
    ("target", "name", "kernel", "unknown"),
    [
        ("tpu_custom_call", "a/splash_mha_dq_segmented", True, False),
        ("tpu_custom_call", "a/jit(grouped_rows)/gmm", True, False),
        ("tpu_custom_call", "a/another", False, True),
        ("__cudnn$fmhaSoftmaxBackward", "", True, False),
        ("Sharding", "a/jit(grouped_rows)/gmm", False, False),
    ],
)
def test_a_call_that_may_multiply_is_known_or_named(target, name, kernel, unknown):
    call = f'ROOT %c = f32[8] custom-call(%a), custom_call_target="{target}"'
    metadata = f', metadata={{op_name="{name}"}}'
    module = read_module(in_one(f"  %a = f32[8] parameter(0)\n  {call}{metadata}"))
    assert is_kernel(module.entry.root) is kernel
    assert count_flops(module.executed).unknown == ((target,) if unknown else ())


@pytest.mark.parametrize(
    ("name", "unknown"),
    [("part.norm/backward_norm/pallas_call", 0), ("part.other/pallas_call", 1)],
)
def test_a_kernel_of_a_norm_multiplies_no_matrices(name, unknown):
    text = in_one(
        "  %a = bf16[16,64] parameter(0)\n"
        "  ROOT %c = bf16[16,64] custom-call(%a), "
        'custom_call_target="__gpu$xla.gpu.triton", '
        f'metadata={{op_name="jit(step)/{name}"}}'
    )
    assert len(count_flops(read_module(text).executed).unknown) == unknown
