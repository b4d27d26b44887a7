"""Muon: orthogonalized momentum of matrices. AdamW updates all other parameters.

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
from train.core.optimizer.adamw import make_adamw, max_adam_direction
from train.core.optimizer.parts import RuleInputs, UpdateRule
from train.core.optimizer.rates import ParamRates, add_decay, scale_by_rate
from train.optimizers.matrix_dims import MatrixDims, matrix_dims
from train.optimizers.whole_matrices import map_whole_matrices


def make_muon(
    config: OptimizerConfig, inputs: RuleInputs
) -> optax.GradientTransformation:
    """Return a transformation that updates matrices by Muon, and the rest by AdamW."""
    labels = jax.tree.map(
        lambda info: "muon" if info.kind is Kind.matrix else "adamw",
        inputs.infos,
        is_leaf=is_info,
    )
    momentum, orthogonalization = muon(
        config,
        inputs.infos,
        compute_dtype=inputs.compute_dtype,
        mesh=inputs.mesh,
        specs=inputs.specs,
    )
    muon_part = optax.chain(
        momentum,
        orthogonalization,
        add_decay(inputs.rates, optax.EmptyState()),
        scale_by_rate(inputs.rates),
    )
    adamw_part = make_adamw(config, inputs)
    return optax.partition({"muon": muon_part, "adamw": adamw_part}, labels)


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


def matrix_rates(config: OptimizerConfig) -> ParamRates:
    """Return Muon's rate and decay."""
    return ParamRates(config.muon_learning_rate, config.muon_weight_decay)


def width_exponent(config: OptimizerConfig) -> float:
    """Return the power of 1 / width that keeps Muon's updates the same at any width.

    The scale `spectral` already fits all widths. With `rms`, updates grow by the root
    of the width.
    """
    return 0.0 if config.muon_scale is MuonScale.spectral else 0.5


# Muon's direction is below the root of a dim, so only Adam's needs a bound. Layers
# cannot be updated one by one, because devices exchange all matrices together.
MUON = UpdateRule(
    make_muon,
    max_adam_direction,
    matrix_rates,
    width_exponent,
    checks_again=False,  # Products of Muon are too expensive to compute twice.
)
