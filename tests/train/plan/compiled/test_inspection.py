"""A compiled step is inspected: one for this CPU, and stored ones for TPUs."""

import jax
import jax.numpy as jnp
import pytest

from model.params import named
from tests.train.compiled import B, L, T, in_one
from train.plan.compiled.inspection import InPlace, inspect

HEADS = 4


def state_names(step) -> list[str]:
    return [name for name, _ in named(step.program.state)]


@pytest.mark.parametrize("name", ["", "fsdp"])
def test_every_array_of_the_state_is_updated_in_place(compile_step, stored_step, name):
    overrides = "mesh=fsdp", "model.compute_dtype=float32"
    step = stored_step(name) if name else compile_step(overrides)
    assert inspect(step.text, state_names(step)).in_place == InPlace(
        state_names(step), []
    )


def test_arrays_that_are_not_donated_are_named():
    def step(state, batch):
        return {name: x + batch for name, x in state.items()}

    state = {"a": jnp.zeros(8), "b": jnp.zeros(9)[:8]}
    batch = jnp.ones(8)
    undonated = jax.jit(step).lower(state, batch).compile().as_text()
    assert inspect(undonated, ["a", "b"]).in_place == InPlace([], ["a", "b"])
    donated = jax.jit(step, donate_argnums=0).lower(state, batch).compile().as_text()
    assert inspect(donated, ["a", "b"]).in_place == InPlace(["a", "b"], [])


def test_the_largest_buffers_name_the_instruction_that_made_them(compile_step):
    """One holds all layers' attention weights, of half of the queries and all keys."""
    inspection = inspect(
        compile_step(["mesh=fsdp", "model.compute_dtype=float32"]).text, []
    )
    sizes = [buffer.bytes for buffer in inspection.buffers]
    assert sizes == sorted(sizes, reverse=True)
    scores = 4 * L * B // 8 * HEADS * T * T // 2
    first = next(buffer for buffer in inspection.buffers if buffer.bytes == scores)
    assert first.made.startswith("layers forward attention (")


def test_initial_values_and_results_of_the_program_are_no_buffers():
    text = in_one(
        "  %x = f32[64] parameter(0)\n"
        "  %zero = f32[] constant(0)\n"
        "  %zeros = f32[64] broadcast(%zero), dimensions={}\n"
        "  %start = f32[64] copy(%zeros)\n"
        "  %sum = f32[64] add(%start, %x)\n"
        "  %result = f32[64] negate(%sum)\n"
        "  ROOT %r = (f32[64]) tuple(%result)"
    )
    (buffer,) = inspect(text, []).buffers
    assert (buffer.array, buffer.made) == ("f32[64]", "(sum)")


@pytest.mark.parametrize(("name", "forward"), [("ddp_full", 2), ("ddp_attention", 1)])
def test_kernels_have_names_and_counts(stored_step, name, forward):
    assert inspect(stored_step(name).text, []).kernels == {
        "splash_mha_fwd_segmented_residuals": forward * L,
        "splash_mha_dq_segmented_no_residuals": L,
        "splash_mha_dkv_segmented_no_residuals": L,
    }
