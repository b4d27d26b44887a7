"""What is said of a compiled step, of one for this CPU and of stored ones for TPUs."""

import jax
import jax.numpy as jnp
import pytest

from model.params import named
from tests.train.compiled import B, L, T, in_one
from train.plan.compiled.hlo import parse
from train.plan.compiled.inspection import inspect, updated_in_place
from train.plan.compiled.source_lines import ROOT, SourceLines

HEADS = 4


def names(step) -> list[str]:
    return [name for name, _ in named(step.program.state)]


def look_into(step):
    return inspect(step.text, names(step))


@pytest.fixture(scope="module")
def found(compile_step):
    return look_into(compile_step("mesh=fsdp", "model.compute_dtype=float32"))


def test_every_array_of_the_state_is_updated_in_place(found, compile_step):
    step = compile_step("mesh=fsdp", "model.compute_dtype=float32")
    assert found.in_place == (names(step), [])


@pytest.mark.parametrize("name", ["fsdp", "ddp_full", "tensor"])
def test_so_it_is_on_a_tpu(stored_step, name):
    step = stored_step(name)
    assert updated_in_place(step.text, names(step)) == (names(step), [])


def test_what_is_not_donated_is_named():
    def step(state, batch):
        return {name: x + batch for name, x in state.items()}

    state, batch = {"a": jnp.zeros(8), "b": jnp.zeros(9)[:8]}, jnp.ones(8)
    kept = jax.jit(step).lower(state, batch).compile().as_text()
    assert inspect(kept, ["a", "b"]).in_place == ([], ["a", "b"])
    given = jax.jit(step, donate_argnums=0).lower(state, batch).compile().as_text()
    assert inspect(given, ["a", "b"]).in_place == (["a", "b"], [])


def test_the_largest_buffers_have_a_maker_a_line_and_an_end(found):
    """Attention's weights of all layers and half of the queries, which see all keys."""
    sizes = [buffer.bytes for buffer in found.buffers]
    assert sizes == sorted(sizes, reverse=True)
    scores = 4 * L * B // 8 * HEADS * T * T // 2
    first = next(buffer for buffer in found.buffers if buffer.bytes == scores)
    assert first.made.startswith("layers forward attention, model/")
    assert first.dies.startswith("layers backward")  # a slice of a layer
    assert "model/attention/xla.py:" in first.made
    assert not any("main" in buffer.made for buffer in found.buffers)


def test_products_of_float32_and_of_bfloat16_are_told_apart(found, stored_step):
    assert {*found.operand_bytes} == {"f32"}
    on_tpu = look_into(stored_step("fsdp")).operand_bytes
    assert on_tpu["bf16"] > 0.95 * sum(on_tpu.values())


INT8 = """  %a = s8[16,64] parameter(0)
  %b = s8[64,32] parameter(1)
  ROOT %c = s32[16,32] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\
"""
CUBLAS = """  %a = f8e4m3fn[16,64] parameter(0)
  %b = f8e4m3fn[32,64] parameter(1)
  %scale = f32[] parameter(2)
  ROOT %c = (bf16[16,32], s8[1024]) custom-call(%a, %b, %scale, %scale), \
custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}"""
GROUPED = """  %sizes = s32[8] parameter(0)
  %a = bf16[16,64] parameter(1)
  %b = bf16[8,64,32] parameter(2)
  ROOT %c = bf16[16,32] custom-call(%sizes, %a, %b), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/(grouped_rows)"}"""


@pytest.mark.parametrize(
    ("instruction", "operands"),
    [
        (INT8, {"s8": 16 * 64 + 64 * 32}),
        (CUBLAS, {"f8e4m3fn": 16 * 64 + 32 * 64}),
        (GROUPED, {"bf16": 2 * (16 * 64 + 8 * 64 * 32)}),
    ],
    ids=["int8", "cublas", "experts"],
)
def test_whatever_multiplies_has_operands(instruction, operands):
    """But no scales, and no sizes of groups."""
    assert inspect(in_one(instruction), []).operand_bytes == operands


@pytest.mark.parametrize(("name", "forward"), [("ddp_full", 2), ("ddp_attention", 1)])
def test_kernels_have_names_and_counts(stored_step, name, forward):
    assert look_into(stored_step(name)).kernels == {
        "splash_mha_fwd_segmented_residuals": forward * L,
        "splash_mha_dq_segmented_no_residuals": L,
        "splash_mha_dkv_segmented_no_residuals": L,
    }


def test_a_copy_that_costs_much_is_listed_and_a_small_one_is_not():
    lines = [
        "HloModule copies, is_scheduled=true",
        "",
        "ENTRY %main (a: f32[64,64], b: f32[8]) -> f32[64,64] {",
        "  %a = f32[64,64]{1,0} parameter(0)",
        "  %b = f32[8]{0} parameter(1)",
        "  %small = f32[8]{0} copy(%b)",
        "  %large = f32[64,64]{0,1} copy(%a), "
        'metadata={op_name="jit(step)/jvp(layers)/part.mlp/mul"}',
        "  ROOT %sum = f32[64,64]{0,1} add(%large, %large)",
        "}",
    ]
    (copy,) = inspect("\n".join(lines), []).copies
    assert (copy.name, copy.times, copy.bytes) == ("large", 1, 2 * 4 * 64 * 64)
    assert copy.what == "layers forward mlp"
    assert copy.share == pytest.approx(2 / 5, rel=0.01)


@pytest.mark.parametrize("more", [0, 1])
def test_lines_are_those_of_this_source_innermost_first(more):
    """Whether a caller's number is written as it is, or plus one (jax 0.10)."""
    tables = f"""HloModule one
FileNames
1 "{ROOT}/train/step.py"
2 "{ROOT}/model/linear.py"
3 "/lib/jax/einsum.py"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=10 end_line=10 column=9}}
2 {{file_name_id=2 function_name_id=2 line=20 end_line=20 column=9}}
3 {{file_name_id=2 function_name_id=3 line=30 end_line=30 column=9}}
4 {{file_name_id=3 function_name_id=4 line=40 end_line=40 column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id={more}}}
2 {{file_location_id=2 parent_frame_id={1 + more}}}
3 {{file_location_id=3 parent_frame_id={2 + more}}}
4 {{file_location_id=4 parent_frame_id={3 + more}}}
"""
    line = '  ROOT %a = f32[1] parameter(0), metadata={op_name="a" stack_frame_id=4}'
    module = parse(in_one(line))
    lines = SourceLines(tables).line_of(module.entry.root)
    assert lines == "model/linear.py:30 < train/step.py:10"
    assert SourceLines("HloModule one").line_of(module.entry.root) == ""
