"""Devices exchange rows and gradients with explicit collectives."""

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


def equations(jaxpr, outer_names=()):
    """Yield each equation, and the names of the primitives that contain it."""
    for equation in jaxpr.eqns:
        yield equation, outer_names
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, (*outer_names, equation.primitive.name))


def trace_gradients(program):
    gradients = make_gradients(program.model, program.execution, program.recipe)
    jaxpr = jax.make_jaxpr(gradients)(program.state.params, program.batch)
    return [*equations(jaxpr.jaxpr)]


def reduced_arrays(traced_equations, name):
    """Yield the arrays, but no scalars, that are summed over rows of the batch."""
    for equation, outer_names in traced_equations:
        if equation.primitive.name == name:
            axes = equation.params.get("axes") or equation.params["axis_name"]
            for var in equation.invars if {*axes} & {"data", "fsdp"} else ():
                if var.aval.ndim:
                    yield outer_names, var.aval


def test_replicas_sum_gradients_once_after_all_microbatches(programs):
    program = programs([*CUBE, "train.accumulation_steps=2"], devices=8)
    sums = [*reduced_arrays(trace_gradients(program), "psum")]
    assert len(sums) > 6
    assert not [outer_names for outer_names, _ in sums if "scan" in outer_names]


def test_with_one_microbatch_layers_sum_gradients_in_the_backward_pass(programs):
    sums = [*reduced_arrays(trace_gradients(programs(CUBE, devices=8)), "psum")]
    ndims = [aval.ndim for outer_names, aval in sums if "scan" in outer_names]
    assert len(ndims) == 6  # A layer of gpt_nano has six matrices.
    assert all(ndim >= 2 for ndim in ndims)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_matrices_are_reduced_in_the_reduce_dtype(programs, dtype):
    program = programs([*CUBE, f"train.reduce_dtype={dtype}"], devices=8)
    traced_equations = trace_gradients(program)
    for name in ("reduce_scatter", "psum"):
        dtypes = {
            str(aval.dtype)
            for _, aval in reduced_arrays(traced_equations, name)
            if aval.ndim > 2
        }
        assert dtypes == {dtype}


def run(program, batch, **changes):
    """Return loss and gradients of fixed parameters, and the names of primitives."""
    execution = program.execution._replace(
        placement=replace(program.execution.placement, **changes)
    )
    gradients = make_gradients(program.model, execution, program.recipe)
    params = params_of(GPT(program.config.model, nnx.Rngs(1), MODEL_PARTS))
    params = jax.device_put(params, program.shardings.params)
    sharded_batch = jax.device_put(
        jax.tree.map(jnp.asarray, batch), program.batch_shardings
    )
    jaxpr = jax.make_jaxpr(gradients)(params, sharded_batch)
    result = jax.device_get(jax.jit(gradients)(params, sharded_batch))
    return result, {e.primitive.name for e, _ in equations(jaxpr.jaxpr)}


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def batch(programs, store):
    return Order(store, programs(CUBE, devices=8).config.data, 0).read(0)


def test_exchanged_rows_and_a_gathered_table_give_the_same_gradient(programs, batch):
    """Devices exchange rows of the table or gather the table."""
    program = programs(CUBE, devices=8)
    assert program.execution.placement.exchange_embedding_rows
    rows, names = run(program, batch)
    assert "all_to_all" in names
    table, names = run(program, batch, exchange_embedding_rows=False)
    assert "all_to_all" not in names
    assert_close(rows, table)


def test_a_cpu_multiplies_bfloat16_weights_without_moving_their_dims(programs, batch):
    """XLA's CPU has no product for a bfloat16 operand with its dims moved."""
    rounded = ("model.compute_dtype=bfloat16", "train.remat=full")
    (loss, *_), _ = run(programs(["mesh.fsdp=2", *rounded], devices=2), batch)
    assert np.isfinite(loss)
