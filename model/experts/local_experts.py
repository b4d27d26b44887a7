"""What a device's own experts make of rows: each is an MLP, with or without biases.

Shapes: n tokens, k experts of each, R rows, D embed, F an expert's hidden dim, E
experts of the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.config import ModelConfig
from model.eight_bits.float8 import FORWARD, float8_scale, to_float8
from model.execution import CallContext, Execution
from model.experts.grouped import grouped_product
from model.experts.rows import from_rows, to_rows
from model.layers import activate
from model.linear import product
from model.scopes import expected, part_scope
from model.taps import count_rounding

# What is made, and what float8 loses of the rows' operands if somebody watches.
Made = tuple[jax.Array, jax.Array | None]


class HeldExperts(NamedTuple):
    """A device's own experts, and whom it shares them with.

    matrices: of its own experts: up, gate if there is one, down.
    biases: of all experts, likewise; or none.
    config: of the model.
    execution: how the program runs.
    call: the context of this call.
    apart: mesh axes along which devices have other tokens and other experts.
    shared: mesh axes along which devices share each expert.
    """

    matrices: Sequence[jax.Array]
    biases: Sequence[jax.Array]
    config: ModelConfig
    execution: Execution
    call: CallContext
    apart: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """How many are its own."""
        return self.matrices[0].shape[0]

    @property
    def own_biases(self) -> list[jax.Array]:
        """Biases of its own experts."""
        if not self.apart:
            return list(self.biases)
        first, cut = self.number * jax.lax.axis_index(self.apart), self.number
        return [jax.lax.dynamic_slice_in_dim(b, first, cut) for b in self.biases]

    def added_up(self, y_nD: jax.Array, counts: jax.Array | None) -> Made:
        """Add up what the devices that share each expert made, and all counted."""
        y_nD = jax.lax.psum(y_nD, self.shared) if self.shared else y_nD
        axes = *self.apart, *self.shared
        return y_nD, None if counts is None else jax.lax.psum(counts, axes)


def sorted_rows(
    experts_nk: jax.Array, num_experts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort tokens' choices by expert; those of no expert, `num_experts`, come last.

    Returns:
        The row of each choice [n, k], the choice of each row [n k], and rows [E].
    """
    chosen = experts_nk.reshape(-1)
    order = jnp.argsort(chosen)
    row_nk = jnp.argsort(order).reshape(experts_nk.shape)
    is_of = chosen[:, None] == jnp.arange(num_experts)[None]
    return row_nk, order, jnp.sum(is_of, axis=0, dtype=jnp.int32)


def local_experts(
    x_nD: jax.Array,
    experts_nk: jax.Array,
    weights_nk: jax.Array,
    held: HeldExperts,
) -> Made:
    """Add up what a device's own experts, 0 to E, make of tokens.

    Their last biases are left to the caller: devices may share an expert, and what each
    of them makes is added up.
    """
    (n, k), E = experts_nk.shape, held.number
    own = jnp.where((experts_nk >= 0) & (experts_nk < E), experts_nk, E)
    row_nk, order, sizes_E = sorted_rows(own, E)
    R = n * min(k, E)
    assigned_R = order[:R]
    x_RD = to_rows(x_nD, assigned_R // k, row_nk)
    weights_R1 = to_rows(weights_nk.reshape(-1, 1), assigned_R, row_nk.reshape(-1, 1))
    usual = n * k * E // held.config.num_experts
    y_RD, counts = mlps(x_RD, weights_R1, sizes_E, usual, held)
    return from_rows(y_RD, assigned_R // k, row_nk), counts


def mlps(
    x_RD: jax.Array,
    weights_R1: jax.Array,
    sizes_E: jax.Array,
    usual: int,
    held: HeldExperts,
) -> Made:
    """Make of rows what their experts do, by their weights, but for the last bias.

    Args:
        x_RD: rows, sorted by expert.
        weights_R1: of each.
        sizes_E: rows of each expert.
        usual: how many rows there are where all experts get as many.
        held: the experts.
    """
    (up, *gate, down), biases = held.matrices, held.own_biases[:-1]
    numerics, call = held.execution.numerics, held.call
    float8 = None if call.high_precision else numerics.expert_quantization
    watched = call.taps is not None and float8 is not None
    counts = list[jax.Array]()

    def multiply(name: str, x: jax.Array, w: jax.Array) -> jax.Array:
        with part_scope(name), expected(usual, x.shape[0]):
            if watched:
                rounded = x.astype(numerics.compute_dtype)
                in_eight = to_float8(rounded, FORWARD, float8_scale(rounded, FORWARD))
                used_R1 = jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes_E)
                counts.append(count_rounding(rounded, in_eight, used_R1))
            return grouped_product(
                x,
                w,
                sizes_E,
                numerics.compute_dtype,
                body=held.execution.grouped,
                float8=float8,
            )

    inner = [multiply("up", x_RD, up), *(multiply("gate", x_RD, w) for w in gate)]
    if biases:
        ends_E, row_R1 = jnp.cumsum(sizes_E), jnp.arange(x_RD.shape[0])[:, None]
        ends_1E, sizes_1E = ends_E[None], sizes_E[None]
        is_own_RE = (row_R1 >= ends_1E - sizes_1E) & (row_R1 < ends_1E)
        shares_RE = is_own_RE.astype(x_RD.dtype)
        added = (_shared_out(shares_RE, bias, held.execution) for bias in biases)
        inner = [h + bias for h, bias in zip(inner, added, strict=True)]
    h_RF = activate(held.config, inner[0], inner[1] if gate else None)
    # Weighted here: the gradient of a weight needs no result of the last product.
    y_RD = multiply("down", (h_RF * weights_R1).astype(x_RD.dtype), down)
    return y_RD, jnp.sum(jnp.stack(counts), axis=0) if watched else None


def with_bias(
    y_nD: jax.Array,
    experts_nk: jax.Array,
    weights_nk: jax.Array,
    biases: Sequence[jax.Array],
    execution: Execution,
) -> jax.Array:
    """Add the last biases, if there are some, of experts 0 to E that tokens chose."""
    if not biases:
        return y_nD
    (bias_ED,) = biases
    chosen_nkE = experts_nk[..., None] == jnp.arange(bias_ED.shape[0])[None, None]
    shares_nE = jnp.sum(jnp.where(chosen_nkE, weights_nk[..., None], 0), axis=1)
    return y_nD + _shared_out(shares_nE, bias_ED, execution).astype(y_nD.dtype)


def _shared_out(shares: jax.Array, bias: jax.Array, execution: Execution) -> jax.Array:
    """Add up experts' biases [E, F] by shares [M, E].

    A product, since the gradient of rows that are copied would be a scatter.
    """
    with part_scope("bias"):
        return product("me,ef->mf", shares, bias, execution.numerics.compute_dtype)
