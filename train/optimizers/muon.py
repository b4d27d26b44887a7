"""Muon: orthogonalized momentum.

Source: https://kellerjordan.github.io/posts/muon/; arXiv:2502.16982, equation 4, for
the scale `rms`; arXiv:2602.15763 (Muon Split) for one matrix for each head.
"""

from functools import partial
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from model.params import Kind, is_info
from model.products import product
from model.scopes import part_scope
from train.config import MuonScale, OptimizerConfig
from train.optimizers.matrix_dims import MatrixDims, matrix_dims
from train.optimizers.whole_matrices import map_whole_matrices


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
    dims = [
        matrix_dims(info, per_head=config.muon_per_head)
        for info in leaves
        if info.kind is Kind.matrix
    ]
    orthogonalize_stack = partial(orthogonalize, compute_dtype=compute_dtype)

    def orthogonalize_locally(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            param_dims.from_stack(orthogonalize_stack(param_dims.to_stack(x)), x.shape)
            for x, param_dims in zip(arrays, dims, strict=True)
        ]

    def orthogonalize_on_mesh(arrays: list[jax.Array]) -> list[jax.Array]:
        assert mesh is not None
        flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        pairs = zip(leaves, flat, strict=True)
        return map_whole_matrices(
            orthogonalize_stack,
            arrays,
            dims=dims,
            specs=[spec for info, spec in pairs if info.kind is Kind.matrix],
            mesh=mesh,
            dtype=compute_dtype,
        )

    def compute_directions(updates: Any, params: Any) -> Any:
        arrays, tree = jax.tree.flatten(updates)
        run = orthogonalize_on_mesh if mesh and mesh.size > 1 else orthogonalize_locally
        with part_scope("muon"):
            results = run(arrays)
            return tree.unflatten(
                _scale_of(config.muon_scale, x.shape, param_dims) * x
                for x, param_dims in zip(results, dims, strict=True)
            )

    momentum = optax.trace(config.muon_momentum, nesterov=True)
    return momentum, optax.stateless(compute_directions)


def _scale_of(scale: MuonScale, shape: tuple[int, ...], dims: MatrixDims) -> float:
    fan_in, fan_out = dims.fans(shape)
    match scale:
        case MuonScale.spectral:
            return max(1.0, fan_out / fan_in) ** 0.5
        case MuonScale.rms:
            return 0.2 * max(fan_in, fan_out) ** 0.5
        case _:
            assert_never(scale)


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
    a = 3.4445
    b = -4.7750
    c = 2.0315
    for _ in range(5):
        xx = product("lio,ljo->lij", x, x, compute_dtype)
        mix = b * xx + c * product("lij,ljm->lim", xx, xx, compute_dtype)
        x = a * x + product("lij,ljo->lio", mix, x, compute_dtype)
    return x.swapaxes(1, 2) if tall else x
