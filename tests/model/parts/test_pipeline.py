"""Layers on stages compute what layers in sequence do. The bubble has no effect."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from model.axes import AxisRules
from model.execution import NO_CONTEXT, Execution
from model.parts.pipeline import CircularPipeline, interleave_layers
from model.placement import Placement
from model.remat import name_layer_input

STAGES = PartitionSpec("pipeline")
RULES = AxisRules(
    activations=(("batch", "pipeline"), ("seq", None)), params=(("layers", "pipeline"),)
)
# Layer 0 takes values of at least -1, and the last layer makes much lower ones.
WEIGHTS = jnp.stack([jnp.float32(1.5)] * 7 + [jnp.float32(-100)])


def mesh_of(stages: int):
    devices = jax.devices()[:stages]
    auto = (AxisType.Auto,)
    return jax.make_mesh((stages,), ("pipeline",), auto, devices=devices)


def staged_execution(stages: int, **choices) -> Execution:
    return Execution(placement=Placement(mesh_of(stages), RULES), **choices)


def on_stages(function, stages: int, out=STAGES):
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh_of(stages),
            in_specs=STAGES,
            out_specs=out,
            check_vma=False,
        )
    )


def run(weights_L, x_BTD, shift_BT, group, call):
    """Run layers that cannot take the output of the last layer."""
    x_BTD, _ = jax.lax.scan(
        lambda x, w: (jnp.sqrt(x + 1) * w + shift_BT[..., None], None), x_BTD, weights_L
    )
    return x_BTD, None


def loss(weights_L, x_BTD, shift_BT, execution):
    y_BTD, _ = execution.pipeline.run(run, weights_L, x_BTD, shift_BT, execution)
    return jax.lax.psum(jnp.sum(y_BTD**2), "pipeline") / 8, y_BTD  # There are 8 rows.


@pytest.mark.parametrize(
    ("stages", "repeats", "microbatches", "remat"),
    [
        pytest.param(2, 1, 2, "none", marks=pytest.mark.slow),
        (4, 1, 8, "full"),
        pytest.param(4, 2, 4, "none", marks=pytest.mark.slow),
        (2, 4, 8, "full"),
    ],
)
def test_features_and_gradients_are_those_of_layers_in_sequence(
    stages, repeats, microbatches, remat
):
    """Each row has its own shift, so that no row can replace another."""
    x_BTD = jax.random.uniform(jax.random.key(0), (8, 2, 3))
    shift_BT = jnp.arange(16, dtype=jnp.float32).reshape(8, 2)
    execution = staged_execution(
        stages,
        remat=remat,
        pipeline=CircularPipeline(microbatches, repeats),
    )

    def run_in_sequence(weights_L, x_BTD):
        y_BTD, _ = run(weights_L, x_BTD, shift_BT, 0, NO_CONTEXT)
        return jnp.sum(y_BTD**2) / 8, y_BTD

    def staged(weights_L, x_BTD, shift_BT):
        # The sum over devices gives each device the gradient of all.
        objective = partial(loss, execution=execution)
        grads, y = jax.grad(objective, (0, 1), has_aux=True)(weights_L, x_BTD, shift_BT)
        return jax.tree.map(lambda grad: grad / stages, grads), y

    grads, y_BTD = jax.grad(run_in_sequence, (0, 1), has_aux=True)(WEIGHTS, x_BTD)
    actual = on_stages(staged, stages)(WEIGHTS, x_BTD, shift_BT)
    for a, b in zip(
        jax.tree.leaves(actual), jax.tree.leaves((grads, y_BTD)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(("stages", "repeats"), [(4, 2), (4, 3), (4, 6)])
def test_each_stage_gets_every_sth_group_of_layers(stages, repeats):
    """Each group has two layers. Stages need not divide repeats, nor the reverse."""
    layers = jnp.arange(2 * stages * repeats)
    actual = on_stages(
        lambda local_layers: interleave_layers(local_layers, "pipeline", repeats),
        stages,
    )(layers)
    groups = np.asarray(layers).reshape(repeats, stages, 2).swapaxes(0, 1)
    np.testing.assert_array_equal(np.asarray(actual), groups.ravel())


@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_iteration_saves_a_copy_of_its_layers(remat):
    """The backward pass saves the activations of each iteration, and weights once."""
    execution = staged_execution(2, remat=remat, pipeline=CircularPipeline(2, 2))

    def run_layers(weights_LDD, x_BTD, rows, group, call):
        def layer(x, w):
            return jnp.tanh(jnp.einsum("btd,de->bte", name_layer_input(x), w)), None

        return jax.lax.scan(layer, x_BTD, weights_LDD)[0], None

    def staged(weights_LDD, x_BTD):
        def total(weights_LDD):
            y_BTD, _ = execution.pipeline.run(
                run_layers, weights_LDD, x_BTD, None, execution
            )
            return jnp.sum(y_BTD)

        return jax.grad(total)(weights_LDD)

    shapes = jnp.ones((8, 7, 7)), jnp.ones((4, 1, 7))
    text = str(jax.make_jaxpr(on_stages(staged, 2))(*shapes))
    assert "f32[5,2,2,1,7]" in text  # There are 5 iterations, 2 layers and 2 rows.
    assert "f32[5,2,7,7]" not in text
