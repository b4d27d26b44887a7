"""What each device does of a step by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from data.batches import Order
from model.catalog import MODEL_PARTS
from model.gpt import GPT, params_of
from tests.train.conftest import CUBE
from train.core.step import make_gradients


def equations(jaxpr, inside=()):
    """Yield (equation, names of what it is inside of)."""
    for equation in jaxpr.eqns:
        yield equation, inside
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, (*inside, equation.primitive.name))


def traced(program):
    gradients = make_gradients(program.model, program.execution, program.recipe)
    jaxpr = jax.make_jaxpr(gradients)(program.state.params, program.batch)
    return [*equations(jaxpr.jaxpr)]


def reduced(found, name):
    """Give the arrays, no numbers, that are added up over rows of the batch."""
    for equation, inside in found:
        if equation.primitive.name == name:
            axes = equation.params.get("axes") or equation.params["axis_name"]
            for var in equation.invars if {*axes} & {"data", "fsdp"} else ():
                if var.aval.ndim:
                    yield inside, var.aval


def test_copies_add_up_once_behind_all_microbatches(programs):
    program = programs(*CUBE, "train.accumulation_steps=2", devices=8)
    found = [*reduced(traced(program), "psum")]
    assert len(found) > 6
    assert not [inside for inside, _ in found if "scan" in inside]


def test_with_one_microbatch_layers_add_up_in_their_backward_pass(programs):
    found = [*reduced(traced(programs(*CUBE, devices=8)), "psum")]
    inside = [aval.ndim for where, aval in found if "scan" in where]
    assert len(inside) == 6  # matrices of a layer of gpt_nano
    assert all(ndim >= 2 for ndim in inside)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_matrices_travel_in_the_reduce_dtype(programs, dtype):
    program = programs(*CUBE, f"train.reduce_dtype={dtype}", devices=8)
    found = traced(program)
    for name in ("reduce_scatter", "psum"):
        dtypes = {str(aval.dtype) for _, aval in reduced(found, name) if aval.ndim > 2}
        assert dtypes == {dtype}


def run(program, batch, **changes):
    """Return loss and gradients of fixed parameters, and the names of primitives."""
    execution = program.execution._replace(
        placement=replace(program.execution.placement, **changes)
    )
    gradients = make_gradients(program.model, execution, program.recipe)
    params = params_of(GPT(program.config.model, nnx.Rngs(1), MODEL_PARTS))
    params = jax.device_put(params, program.shardings.params)
    placed = jax.device_put(jax.tree.map(jnp.asarray, batch), program.batch_shardings)
    jaxpr = jax.make_jaxpr(gradients)(params, placed)
    result = jax.device_get(jax.jit(gradients)(params, placed))
    return result, {e.primitive.name for e, _ in equations(jaxpr.jaxpr)}


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def batch(programs, store):
    return Order(store, programs(*CUBE, devices=8).config.data, 0).read(0)


def test_rows_travel_or_the_table_does(programs, batch):
    """With the same gradient."""
    program = programs(*CUBE, devices=8)
    assert program.execution.placement.exchange_embedding_rows
    rows, names = run(program, batch)
    assert "all_to_all" in names
    table, names = run(program, batch, exchange_embedding_rows=False)
    assert "all_to_all" not in names
    close(rows, table)


def test_this_cpu_multiplies_rounded_weights_as_they_were_gathered(programs, batch):
    """XLA's CPU has no product for a bfloat16 operand with its dims moved."""
    rounded = ("model.compute_dtype=bfloat16", "train.remat=full")
    (loss, *_), _ = run(programs("mesh.fsdp=2", *rounded, devices=2), batch)
    assert np.isfinite(loss)
