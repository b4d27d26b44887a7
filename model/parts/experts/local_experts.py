"""Run rows through the local experts, which are MLPs with or without biases.

Shapes: n tokens, k experts of each, R rows, D embed, F an expert's hidden dim, E
experts of the device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from model.choices import Grouped
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.layers import activate
from model.parts.eight_bits.float8 import FORWARD, float8_scale, to_float8
from model.parts.experts.grouped import grouped_product
from model.parts.experts.rows import from_rows, to_rows
from model.products import product
from model.scopes import part_scope
from model.taps import count_rounding


class Tokens(NamedTuple):
    """Tokens and their experts, each array with the same leading dims.

    x: the tokens, with a last dim of D.
    experts: the int32 numbers of each token's k experts.
    weights: the weights of these experts.
    """

    x: jax.Array
    experts: jax.Array
    weights: jax.Array


class Output(NamedTuple):
    """The output, and the counts of `count_rounding` if a watched step quantizes."""

    y: jax.Array
    counts: jax.Array | None


class LocalExperts(NamedTuple):
    """A device's local experts.

    matrices: the up, gate (if there is one) and down matrices of the local experts.
    biases: in the same order, the biases of the experts of all devices; or empty.
    expert_axes: mesh axes over which both tokens and experts are sharded.
    hidden_axes: mesh axes over which the hidden dim of each expert is sharded.
    """

    matrices: Sequence[jax.Array]
    biases: Sequence[jax.Array]
    config: ModelConfig
    execution: Execution
    call: CallContext
    expert_axes: tuple[str, ...] = ()
    hidden_axes: tuple[str, ...] = ()

    @property
    def num_local(self) -> int:
        """The number of local experts."""
        return self.matrices[0].shape[0]

    @property
    def local_biases(self) -> Sequence[jax.Array]:
        """Biases of the local experts."""
        if not self.expert_axes:
            return self.biases
        E = self.num_local
        device = jax.lax.axis_index(self.expert_axes)
        return [jax.lax.dynamic_slice_in_dim(b, device * E, E) for b in self.biases]

    def reduce(self, output: Output) -> Output:
        """Sum the output over `hidden_axes`, and the counts also over `expert_axes`."""
        y, counts = output
        y = jax.lax.psum(y, self.hidden_axes) if self.hidden_axes else y
        axes = *self.expert_axes, *self.hidden_axes
        return Output(y, None if counts is None else jax.lax.psum(counts, axes))


def sort_rows(
    experts_nk: jax.Array, num_experts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort tokens' choices by expert. The choice `num_experts` stands for no expert.

    Returns:
        The row of each choice [n, k], the choice of each row [n k], and the
        number of rows of each expert.
    """
    chosen = experts_nk.reshape(-1)
    order = jnp.argsort(chosen)
    row_nk = jnp.argsort(order).reshape(experts_nk.shape)
    is_chosen = chosen[:, None] == jnp.arange(num_experts)[None]
    return row_nk, order, jnp.sum(is_chosen, axis=0, dtype=jnp.int32)


def run_local_experts(
    tokens: Tokens, experts: LocalExperts, capacity: int | None = None
) -> Output:
    """Return, for each token, the sum of its local experts' weighted outputs.

    Local experts are numbered 0 to E - 1. The caller adds the biases of `down` after it
    has summed over `hidden_axes`, and knows that tokens have at most `capacity` rows.
    """
    n, k = tokens.experts.shape
    E = experts.num_local
    is_local = (tokens.experts >= 0) & (tokens.experts < E)
    row_nk, order, sizes_E = sort_rows(jnp.where(is_local, tokens.experts, E), E)
    R = n * min(k, E) if capacity is None else capacity
    choice_R = order[:R]
    x_RD = to_rows(tokens.x, choice_R // k, row_nk)
    weights_R1 = to_rows(tokens.weights.reshape(-1, 1), choice_R, row_nk.reshape(-1, 1))
    output = run_mlps(x_RD, weights_R1, sizes_E, experts)
    return output._replace(y=from_rows(output.y, choice_R // k, row_nk))


def run_mlps(
    x_RD: jax.Array, weights_R1: jax.Array, sizes_E: jax.Array, experts: LocalExperts
) -> Output:
    """Return the weighted output of each row's expert, without the bias of `down`.

    Args:
        x_RD: rows, sorted by expert.
        weights_R1: the weight of each row.
        sizes_E: the number of rows of each expert.
        experts: the local experts.
    """
    up, *gate, down = experts.matrices
    biases = experts.local_biases[:-1]
    numerics = experts.execution.numerics
    call = experts.call
    float8 = None if call.high_precision else numerics.expert_quantization
    is_monitored = call.taps and call.taps.watched and float8 is not None
    counts = list[jax.Array]()

    def multiply(name: str, x: jax.Array, w: jax.Array) -> jax.Array:
        with part_scope(name):
            if is_monitored:
                rounded = x.astype(numerics.compute_dtype)
                x_8 = to_float8(rounded, FORWARD, float8_scale(rounded, FORWARD))
                used_R1 = jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes_E)
                counts.append(count_rounding(rounded, x_8, used_R1))
            return grouped_product(
                x,
                w,
                sizes_E,
                numerics.compute_dtype,
                kernel=experts.execution.grouped,
                float8=float8,
                # The collectives of `down` swap its dims (model/gather.py).
                swapped=name == "down",
            )

    inner = [multiply("up", x_RD, up), *(multiply("gate", x_RD, w) for w in gate)]
    if biases:
        ends_E = jnp.cumsum(sizes_E)
        row_R1 = jnp.arange(x_RD.shape[0])[:, None]
        ends_1E = ends_E[None]
        sizes_1E = sizes_E[None]
        is_in_expert_RE = (row_R1 >= ends_1E - sizes_1E) & (row_R1 < ends_1E)
        shares_RE = is_in_expert_RE.astype(x_RD.dtype)
        sums = (_sum_biases(shares_RE, bias, experts.execution) for bias in biases)
        inner = [h + bias for h, bias in zip(inner, sums, strict=True)]
    if experts.execution.grouped is Grouped.megablox:
        *inner, weights_R1 = _differentiate_together([*inner, weights_R1])
    h_RF = activate(experts.config, inner[0], inner[1] if gate else None)
    # Apply the router's weights before `down`, so that their gradient does not need the
    # result of `down`.
    y_RD = multiply("down", (h_RF * weights_R1).astype(x_RD.dtype), down)
    return Output(y_RD, jnp.sum(jnp.stack(counts), axis=0) if is_monitored else None)


@jax.custom_vjp
def _differentiate_together(arrays: list[jax.Array]) -> Any:
    """Return the arrays. XLA computes all of their gradients before it uses any.

    Otherwise it would compute the gradient of the router's weights later, and keep the
    other arrays until then.
    """
    return arrays


_differentiate_together.defvjp(
    lambda arrays: (arrays, None),
    lambda _, gradients: (jax.lax.optimization_barrier(gradients),),
)


def add_bias(
    y_nD: jax.Array, tokens: Tokens, biases: Sequence[jax.Array], execution: Execution
) -> jax.Array:
    """Add the weighted `down` biases of each token's experts, if there are biases.

    Only the experts 0 to E - 1 count.
    """
    if not biases:
        return y_nD
    (bias_ED,) = biases
    experts_nk1 = tokens.experts[..., None]
    chosen_nkE = experts_nk1 == jnp.arange(bias_ED.shape[0])[None, None]
    shares_nE = jnp.sum(jnp.where(chosen_nkE, tokens.weights[..., None], 0), axis=1)
    return y_nD + _sum_biases(shares_nE, bias_ED, execution).astype(y_nD.dtype)


def _sum_biases(shares: jax.Array, bias: jax.Array, execution: Execution) -> jax.Array:
    """Sum experts' biases [E, F], weighted by shares [M, E].

    The sum is a product, because the gradient of a gather would be a scatter.
    """
    with part_scope("bias"):
        return product("me,ef->mf", shares, bias, execution.numerics.compute_dtype)
