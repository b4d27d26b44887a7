"""Adafactor computes the same as optax, and treats each layer of a stack alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from model.params import Kind, ParamInfo
from tests.train.core.optimizer.test_update import (
    ADAMW,
    INFOS,
    SHAPES,
    draw,
    take_steps,
)
from train.config import OptimizerName

ADAFACTOR = replace(ADAMW, name=OptimizerName.adafactor, weight_decay=0.0)


def test_single_arrays_are_updated_as_in_optax():
    params = jax.tree.map(lambda x: 0.3 * x, draw(0))
    optimizer = optax.adafactor(ADAFACTOR.learning_rate, min_dim_size_to_factor=1)
    state = optimizer.init(params)
    theirs = params
    ours = take_steps(ADAFACTOR, params, 5)
    for step in range(5):
        updates, state = optimizer.update(draw(step + 1), state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        for name in SHAPES:
            np.testing.assert_allclose(ours[step][0][name], theirs[name], rtol=1e-5)


def test_each_layer_of_a_stack_is_updated_as_a_matrix_of_its_own():
    shape = {"matrix": (2, 8, 3, 4), "vector": (2, 8)}
    axes = ("embed", "heads", "head_dim")
    stacked_infos = {
        "matrix": ParamInfo(("layers", *axes), Kind.matrix, inputs=1),
        "vector": ParamInfo(("layers", "embed"), Kind.vector),
    }
    layer_infos = {
        "matrix": ParamInfo(("embed", "mlp"), Kind.matrix, inputs=1),
        "vector": INFOS["vector"],
    }
    params = draw(0, shape)
    grads = [draw(step, shape) for step in (1, 2)]
    # If both layers were clipped together, the second would make the first smaller.
    scales = jnp.array([1.0, 1e3])
    for grad in grads:
        grad["matrix"] *= scales[:, None, None, None]
    (_, (new_params, state)) = take_steps(
        ADAFACTOR, params, 2, infos=stacked_infos, grads=grads
    )
    state_shapes = {
        leaf.shape for leaf in jax.tree.leaves(state.transform) if leaf.ndim
    }
    rows = (2, 8, 1, 1)
    columns = (2, 1, 3, 4)  # the dims of heads are those of one output
    assert state_shapes == {rows, columns, shape["vector"]}

    def layer_of(tree, layer: int):
        flat = {"matrix": (8, 12), "vector": (8,)}
        return {name: tree[name][layer].reshape(flat[name]) for name in tree}

    for layer in range(2):
        layer_grads = [layer_of(grad, layer) for grad in grads]
        start = layer_of(params, layer)
        (_, (single, _)) = take_steps(
            ADAFACTOR, start, 2, infos=layer_infos, grads=layer_grads
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
            layer_of(new_params, layer),
            single,
        )


def test_padding_of_the_vocabulary_changes_no_step():
    """A step grows with the mean size of weights, in which padding does not count."""
    padding = {"table": 6, "head": 6}
    infos = {
        "table": ParamInfo(("vocab", "embed"), Kind.table),
        "head": ParamInfo(("embed", "vocab"), Kind.table, inputs=1),
    }
    padded_infos = {
        name: info._replace(padding=padding[name]) for name, info in infos.items()
    }

    def pad(tree):
        return {
            "table": jnp.pad(tree["table"], [(0, 6), (0, 0)]),
            "head": jnp.pad(tree["head"], [(0, 0), (0, 6)]),
        }

    shapes = {"table": (10, 8), "head": (8, 10)}
    params = draw(0, shapes)
    grads = [draw(step, shapes) for step in (1, 2)]
    expected = take_steps(ADAFACTOR, params, 2, infos=infos, grads=grads)[-1][0]
    result = take_steps(
        ADAFACTOR,
        pad(params),
        2,
        infos=padded_infos,
        grads=[pad(grad) for grad in grads],
    )[-1][0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        result,
        pad(expected),
    )
