"""FLOPs and bytes of a compiled step."""

import pytest

from tests.train.compiled import DOWN, MATRICES, B, D, F, L, T, V, needs_tpu_compiler
from train.hlo import Module, parse
from train.loops import read
from train.work import memory_bytes, product_flops, work

TOKENS = B * T
FORWARD, BACKWARD = 2, 7  # products over [T, S] that splash makes
ATTENTION = 2 * L * T * D * TOKENS  # FLOPs of one of them


def in_one(instruction: str) -> Module:
    """Parse a program of these instructions."""
    lines = ["HloModule one", "", "ENTRY %main (a: f32[1]) -> f32[1] {", instruction]
    return parse("\n".join([*lines, "}"]))


# By model: overrides, parameters of a layer's matrices.
MODELS = {
    "llama": ((), MATRICES),
    "shared keys and values": (("model.num_kv_heads=2",), MATRICES - D * D),
    "gpt2": (
        ("model=gpt2_124m", "model.tied_head=true", f"model.mlp_dim={F}"),
        4 * D * D + 2 * D * F,
    ),
}


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("model", "remat", "ratio"),
    [
        ("llama", "none", 1.079),
        ("llama", "dots", 1.132),
        ("llama", "full", 1.342),
        ("shared keys and values", "none", 1.086),
        ("shared keys and values", "full", 1.343),
        ("gpt2", "none", 1.094),
        ("gpt2", "full", 1.344),
    ],
)
def test_executed_flops_are_those_derived_by_hand(compile_step, model, remat, ratio):
    """The embedding is looked up, for nothing; the head multiplies, tied or not.

    Recomputed: attention, and with `full` all of a layer but its last product, whose
    result is only added: the backward pass does not need it.
    """
    overrides, matrices = MODELS[model]
    remat_ = f"train.remat={remat}"
    step = compile_step(*overrides, "mesh=ddp", remat_, topology="v5e:2x2")
    done, chips = work(step.module), 4
    products = 6 * (L * matrices + V * D) * TOKENS
    products += 2 * L * (matrices - DOWN) * TOKENS if remat == "full" else 0
    assert done.products * chips == products
    kernels = BACKWARD + FORWARD * (1 if remat == "none" else 2)
    assert done.whole_attention * chips == kernels * ATTENTION
    assert done.attention == done.whole_attention  # a single block has no other above
    model_flops = 6 * (L * matrices + V * D) * TOKENS + 6 * ATTENTION
    assert step.program.flops_per_step == model_flops
    by_hand = (products + kernels * ATTENTION) / model_flops
    assert done.flops * chips / model_flops == pytest.approx(by_hand)
    assert by_hand == pytest.approx(ratio, abs=0.001)
    assert done.unknown == ()


@pytest.mark.parametrize("mesh", ["mesh=ddp", "mesh=fsdp"])
def test_on_a_cpu_attention_is_products_over_the_whole_square(compile_step, mesh):
    step = compile_step(mesh, "model.compute_dtype=float32")
    done = work(step.module)
    assert done.products * 8 == step.program.flops_per_step
    assert done.attention == 0


def test_a_batched_product_of_a_tpu_counts_without_its_padding():
    module = in_one(
        "  %a = bf16[2,1024,2,64,1] parameter(0)\n"
        "  %b = bf16[2,64,8,64,1] parameter(1)\n"
        "  ROOT %c = bf16[2,1024,8,64,1] convolution(%a, %b), "
        "window={size=1x8x2 pad=0_0x7_7x0_0 rhs_reversal=0x1x0}, "
        "dim_labels=0b2f1_2i1o0->0b1f2"
    )
    flops = product_flops(module.entry.root, module.entry)
    assert flops == 2 * (2 * 1024) * (2 * 64) * (8 * 64)


def test_zeros_between_the_inputs_do_not_count():
    module = in_one(
        "  %a = f32[1,3,4] parameter(0)\n"
        "  %b = f32[2,4,8] parameter(1)\n"
        "  ROOT %c = f32[1,4,8] convolution(%a, %b), "
        "window={size=2 lhs_dilate=2}, dim_labels=b0f_0io->b0f"
    )
    flops = product_flops(module.entry.root, module.entry)
    assert flops == 2 * 4 * (4 * 8)  # each of the four windows holds one input


FUSED = """HloModule fused

%inside (p: f32[16,64], i: s32[], q: f32[1,64]) -> f32[16,64] {
  %p = f32[16,64] parameter(0)
  %i = s32[] parameter(1)
  %q = f32[1,64] parameter(2)
  %z = s32[] constant(0)
  %old = f32[1,64] dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,64}
  %new = f32[1,64] add(%old, %q)
  ROOT %u = f32[16,64] dynamic-update-slice(%p, %new, %i, %z)
}

ENTRY %main (a: f32[16,64], i: s32[], b: f32[1,64]) -> f32[16,64] {
  %a = f32[16,64] parameter(0)
  %i = s32[] parameter(1)
  %b = f32[1,64]{1,0:T(1,128)S(1)} parameter(2)
  ROOT %f = f32[16,64] fusion(%a, %i, %b), kind=kLoop, calls=%inside
}
"""


def test_slices_and_updates_move_what_they_touch():
    """A row is read and a row is written; the other operand lies in the core."""
    module = read(FUSED)
    index, row = 4, 4 * 64
    assert memory_bytes(module, module.entry.root, module.entry) == index + 2 * row


@pytest.mark.parametrize(
    ("result", "instruction", "moved"),
    [
        ("(f32[16,64]{0:S(1)}, f32[16,64], u32[])", "copy-start(%main)", 16),
        ("(f32[16,64], f32[16,64]{0:S(1)}, u32[])", "copy-start(%core)", 16),
        ("(f32[16,64], f32[4,64]{0:S(1)}, s32[])", "slice-start(%main)", 4),
        ("f32[16,64]", 'custom-call(), custom_call_target="AllocateBuffer"', 0),
    ],
)
def test_copies_between_memories_move_what_they_copy(result, instruction, moved):
    module = in_one(
        "  %main = f32[16,64] parameter(0)\n"
        "  %core = f32[16,64]{0:S(1)} parameter(1)\n"
        f"  ROOT %c = {result} {instruction}"
    )
    assert memory_bytes(module, module.entry.root, module.entry) == moved * 64 * 4
