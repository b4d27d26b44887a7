"""Muon: orthogonalized momentum.

Source: https://kellerjordan.github.io/posts/muon/.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from model.linear import product
from model.params import Kind, ParamInfo, is_info
from model.scopes import part_scope
from train.config import OptimizerConfig
from train.optimizer.whole_matrices import map_whole_matrices


def muon(
    config: OptimizerConfig,
    infos: Any,
    *,
    compute_dtype: DTypeLike,
    mesh: Mesh | None = None,
    specs: Any = None,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Return Muon's momentum and its orthogonalization, for matrices only.

    The operands of products and the parts that devices exchange have the compute dtype.
    The devices of `mesh` share the work. Without a mesh, one device does it.
    """
    leaves = jax.tree.leaves(infos, is_leaf=is_info)
    matrices = [info for info in leaves if info.kind is Kind.matrix]
    orthogonalize_stack = partial(orthogonalize, compute_dtype=compute_dtype)

    def orthogonalize_locally(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            orthogonalize_stack(x.reshape(-1, *_fans(x.shape, info))).reshape(x.shape)
            for x, info in zip(arrays, matrices, strict=True)
        ]

    def orthogonalize_on_mesh(arrays: list[jax.Array]) -> list[jax.Array]:
        assert mesh is not None
        flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        pairs = zip(leaves, flat, strict=True)
        return map_whole_matrices(
            orthogonalize_stack,
            arrays,
            infos=matrices,
            specs=[spec for info, spec in pairs if info.kind is Kind.matrix],
            mesh=mesh,
            dtype=compute_dtype,
        )

    def compute_directions(updates: Any, params: Any) -> Any:
        arrays, tree = jax.tree.flatten(updates)
        run = orthogonalize_on_mesh if mesh and mesh.size > 1 else orthogonalize_locally
        with part_scope("muon"):
            results = run(arrays)
            return tree.unflatten(map(_scale, results, matrices))

    momentum = optax.trace(config.muon_momentum, nesterov=True)
    return momentum, optax.stateless(compute_directions)


def _fans(shape: tuple[int, ...], info: ParamInfo) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a parameter's matrices."""
    fan_in = math.prod(shape[info.stack_dims : info.output_start])
    return fan_in, math.prod(shape[info.output_start :])


def _scale(x: jax.Array, info: ParamInfo) -> jax.Array:
    fan_in, fan_out = _fans(x.shape, info)
    return max(1.0, fan_out / fan_in) ** 0.5 * x


def orthogonalize(x_LIO: jax.Array, compute_dtype: DTypeLike) -> jax.Array:
    """Return the matrices with all singular values moved close to 1.

    Each of five Newton-Schulz steps replaces x by a x + b x x'x + c x x'x x'x. Products
    are batched over the stack, so matrices do not affect each other.

    Args:
        x_LIO: L matrices of I inputs and O outputs, float32.
        compute_dtype: the dtype of the products' operands; sums are float32.
    """
    tall = x_LIO.shape[1] > x_LIO.shape[2]
    x = x_LIO.swapaxes(1, 2) if tall else x_LIO  # This keeps x x' small.
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        xx = product("lio,ljo->lij", x, x, compute_dtype)
        mix = b * xx + c * product("lij,ljm->lim", xx, xx, compute_dtype)
        x = a * x + product("lij,ljo->lio", mix, x, compute_dtype)
    return x.swapaxes(1, 2) if tall else x
