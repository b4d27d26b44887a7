"""What is said of a compiled step, of one for this CPU and of stored ones for TPUs."""

import jax
import jax.numpy as jnp
import pytest

from model.params import named
from tests.train.compiled import B, L, T
from train.plan.compiled.inspection import InPlace, inspect

HEADS = 4


def names(step) -> list[str]:
    return [name for name, _ in named(step.program.state)]


@pytest.fixture(scope="module")
def found(compile_step):
    return inspect(compile_step("mesh=fsdp", "model.compute_dtype=float32").text, [])


@pytest.mark.parametrize("name", ["", "fsdp"])
def test_every_array_of_the_state_is_updated_in_place(compile_step, stored_step, name):
    on_cpu = "mesh=fsdp", "model.compute_dtype=float32"
    step = stored_step(name) if name else compile_step(*on_cpu)
    assert inspect(step.text, names(step)).in_place == InPlace(names(step), [])


def test_what_is_not_donated_is_named():
    def step(state, batch):
        return {name: x + batch for name, x in state.items()}

    state, batch = {"a": jnp.zeros(8), "b": jnp.zeros(9)[:8]}, jnp.ones(8)
    kept = jax.jit(step).lower(state, batch).compile().as_text()
    assert inspect(kept, ["a", "b"]).in_place == InPlace([], ["a", "b"])
    given = jax.jit(step, donate_argnums=0).lower(state, batch).compile().as_text()
    assert inspect(given, ["a", "b"]).in_place == InPlace(["a", "b"], [])


def test_the_largest_buffers_have_a_maker(found):
    """Attention's weights of all layers and half of the queries, which see all keys."""
    sizes = [buffer.bytes for buffer in found.buffers]
    assert sizes == sorted(sizes, reverse=True)
    scores = 4 * L * B // 8 * HEADS * T * T // 2
    first = next(buffer for buffer in found.buffers if buffer.bytes == scores)
    assert first.made.startswith("layers forward attention (")


def test_a_buffer_is_made_by_what_fills_it_and_a_result_is_none():
    """A loop fills zeros by rows; what it adds up becomes the result."""
    text = """HloModule filled

%body (s: (s32[], f32[4,64], f32[32])) -> (s32[], f32[4,64], f32[32]) {
  %s = (s32[], f32[4,64], f32[32]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %rows = f32[4,64] get-tuple-element(%s), index=1
  %sum = f32[32] get-tuple-element(%s), index=2
  %row = f32[1,64] slice(%rows), slice={[0:1], [0:64]}
  %filled = f32[4,64] dynamic-update-slice(%rows, %row, %i, %i)
  %added = f32[32] add(%sum, %sum)
  ROOT %t = (s32[], f32[4,64], f32[32]) tuple(%i, %filled, %added)
}

ENTRY %main (x: f32[32]) -> f32[32] {
  %x = f32[32] parameter(0)
  %z = s32[] constant(0)
  %zeros = f32[4,64] broadcast(%z), dimensions={}
  %start = (s32[], f32[4,64], f32[32]) tuple(%z, %zeros, %x)
  %loop = (s32[], f32[4,64], f32[32]) while(%start), body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  %last = f32[32] get-tuple-element(%loop), index=2
  ROOT %r = (f32[32]) tuple(%last)
}
"""
    buffers = inspect(text, []).buffers
    expected = [("f32[4,64]", "(filled)"), ("f32[1,64]", "(row)")]
    assert [(buffer.array, buffer.made) for buffer in buffers[:2]] == expected


@pytest.mark.parametrize(("name", "forward"), [("ddp_full", 2), ("ddp_attention", 1)])
def test_kernels_have_names_and_counts(stored_step, name, forward):
    assert inspect(stored_step(name).text, []).kernels == {
        "splash_mha_fwd_segmented_residuals": forward * L,
        "splash_mha_dq_segmented_no_residuals": L,
        "splash_mha_dkv_segmented_no_residuals": L,
    }
