"""An MLP of many experts, of which each token takes a few.

A router scores the experts for each token; the k best each make an MLP of it, and their
results are added up by the router's weights. Nothing is dropped and nothing is
padded to a capacity: rows are sorted by expert, and multiplied by
`model.experts.grouped.grouped_product`, however many each expert gets.

Where experts lie apart along a mesh axis (`expert`) devices gather the tokens of all,
compute the rows of their own experts alone, and add up over devices by a scatter. That
takes room for the worst case, all tokens to one device's experts; so tokens go in
chunks, as many as keep that room below what one device's own tokens take.

Shapes: B batch, T time, n tokens, k experts of each, R rows, D embed, F an expert's
hidden dim, E experts; those of a device inside of `_own_experts`.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from model.axes import mesh_axes
from model.config import ModelConfig
from model.eight_bits.float8 import FORWARD, float8_scale, to_float8
from model.execution import Execution
from model.experts.grouped import grouped_product
from model.experts.router import Choice, Router, Routing
from model.gather import parts_of
from model.layers import MLP, activate, stds
from model.linear import gathered, product
from model.params import Kind, ParamInfo
from model.parts import expected, part
from model.taps import count_rounding


class Experts(nnx.Module):
    """A router, its experts, and what every token takes besides."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Make router, experts and the shared MLP; biases start at zero."""
        D, E, F = config.embed_dim, config.num_experts, config.expert_size
        dtype = jnp.dtype(config.param_dtype)
        std, _ = stds(config, D)
        _, residual_std = stds(config, F)
        self.config = config

        def weight(std: float, *dims: tuple[str, int]) -> nnx.Param:
            axes, shape = zip(*dims, strict=True)
            value = std * jax.random.normal(rngs.params(), shape, dtype)
            return nnx.Param(value, info=ParamInfo(axes, Kind.matrix, 1))

        def bias(*dims: tuple[str, int]) -> nnx.Param | None:
            axes, shape = zip(*dims, strict=True)
            zeros, info = jnp.zeros(shape, dtype), ParamInfo(axes, Kind.vector)
            return nnx.Param(zeros, info=info) if config.bias else None

        embed, experts, hidden = ("embed", D), ("experts", E), ("mlp", F)
        self.router = Router(config, rngs)
        self.up = weight(std, experts, embed, hidden)
        self.gate = weight(std, experts, embed, hidden) if config.gated else None
        self.down = weight(residual_std, experts, hidden, embed)
        self.up_bias = bias(experts, hidden)
        self.gate_bias = bias(experts, hidden) if config.gated else None
        self.down_bias = bias(experts, embed)
        shared = config.shared_experts * F
        self.shared = MLP(config, shared, rngs) if shared else None

    def __call__(
        self, x_BTD: Float[Array, "B T D"], how: Execution
    ) -> tuple[Float[Array, "B T D"], Routing]:
        """Apply position by position."""
        with part("router"):
            choice, routing = self.router(x_BTD, how)
        y_BTD = self._routed(x_BTD, choice, how)
        if self.shared is not None:
            with part("shared"):
                y_BTD = y_BTD + self.shared(x_BTD, how)
        return y_BTD, routing

    def _routed(
        self, x_BTD: Float[Array, "B T D"], choice: Choice, how: Execution
    ) -> Float[Array, "B T D"]:
        """Add up what a token's experts make of it, by the router's weights.

        Weights are gathered, but for the experts' own dim, once for all chunks. Where
        they lie apart, or tokens do, the backward pass does it all once more.
        """
        weights = [w for w in (self.up, self.gate, self.down) if w is not None]
        biases = [self.up_bias, self.gate_bias, self.down_bias]
        biases = [bias for bias in biases if bias is not None]
        cuts = [dict(how.rules.cut(_axes(weight))) for weight in weights]
        apart = cuts[0].get(0, ())
        parts = [parts_of(_axes(weight), how) for weight in weights]
        parts = [p._replace(cut=tuple(c for c in p.cut if c[0])) for p in parts]
        on_device = partial(
            _on_device, config=self.config, how=how, apart=apart, shared=()
        )
        rules = how.rules
        if rules.activations:  # XLA cannot partition a kernel by itself
            rows = rules.spec("batch", "seq", None)
            hidden = rules.param_spec(("mlp",))[0]
            specs = [
                [
                    PartitionSpec(*(hidden if axis == "mlp" else None for axis in axes))
                    for axes in map(_axes, params)
                ]
                for params in (weights, biases)
            ]
            on_device = jax.shard_map(
                partial(on_device, shared=mesh_axes(hidden)),
                in_specs=(rows, rows, rows, *specs),
                out_specs=(rows, PartitionSpec()),
                check_vma=False,
            )

        def run(x_BTD, weights_BTk, weights, biases):
            whole: list[jax.Array] = [
                gathered(weight, own, how.compute_dtype, how.expert_quantization)
                for weight, own in zip(weights, parts, strict=True)
            ]
            return on_device(x_BTD, choice.experts, weights_BTk, whole, biases)

        if apart or any(own.cut for own in parts):
            run = jax.checkpoint(run)
        params = ([param[...] for param in own] for own in (weights, biases))
        y_BTD, counts = run(x_BTD, choice.weights, *params)
        if how.taps is not None and counts is not None:
            how.taps.note_rounding(counts)
        return y_BTD


def _axes(weight: nnx.Param) -> tuple[str, ...]:
    return weight.get_metadata("info").axes


def _on_device(
    x_BTD: jax.Array,
    experts_BTk: jax.Array,
    weights_BTk: jax.Array,
    matrices: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    config: ModelConfig,
    how: Execution,
    apart: tuple[str, ...],
    shared: tuple[str, ...],
) -> tuple[jax.Array, jax.Array | None]:
    """Run a device's own tokens through the experts of all.

    Args:
        x_BTD: own tokens.
        experts_BTk: that they chose, of all devices' experts.
        weights_BTk: of these.
        matrices: of the device's own experts: up, gate if there is one, down.
        biases: of all experts, likewise; or none.
        config: of the model.
        how: execution.
        apart: mesh axes along which devices have other tokens and other experts.
        shared: mesh axes along which devices share each expert.

    Returns:
        What becomes of own tokens; and what float8 loses of all rows (model/taps.py),
        if somebody watches.
    """
    D, k = x_BTD.shape[-1], experts_BTk.shape[-1]
    n, E = math.prod(x_BTD.shape[:-1]), matrices[0].shape[0]
    worst = jax.lax.psum(1, apart) * min(k, E)
    chunks = next(c for c in range(-(-worst // k), n + 1) if n % c == 0)

    def chunk(
        x_nD: jax.Array, experts_nk: jax.Array, weights_nk: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        def of_all(own: jax.Array) -> jax.Array:
            return jax.lax.all_gather(own, apart, tiled=True) if apart else own

        first = E * jax.lax.axis_index(apart) if apart else 0
        own = [
            jax.lax.dynamic_slice_in_dim(bias, first, E) if apart else bias
            for bias in biases
        ]
        choice = of_all(experts_nk) - first, of_all(weights_nk)
        rows = of_all(x_nD), *choice
        y_nD, counts = _own_experts(*rows, matrices, own[:-1], config, how)
        y_nD = jax.lax.psum(y_nD, shared) if shared else y_nD
        if own:
            is_own = choice[0][..., None] == jnp.arange(E)[None, None]
            shares_nE = jnp.sum(jnp.where(is_own, choice[1][..., None], 0), axis=1)
            y_nD = y_nD + _shared_out(shares_nE, own[-1], how).astype(y_nD.dtype)
        y_nD = jax.lax.psum_scatter(y_nD, apart, tiled=True) if apart else y_nD
        return y_nD, jax.tree.map(lambda c: jax.lax.psum(c, (*apart, *shared)), counts)

    flat = x_BTD.reshape(n, D), experts_BTk.reshape(n, k), weights_BTk.reshape(n, k)
    if chunks == 1:
        y, counts = chunk(*flat)
        return y.reshape(x_BTD.shape), counts
    cut = [a.reshape(chunks, n // chunks, a.shape[-1]) for a in flat]
    again = jax.checkpoint(chunk)
    y, counts = jax.lax.map(lambda own: again(*own), cut)
    return y.reshape(x_BTD.shape), jax.tree.map(lambda c: jnp.sum(c, axis=0), counts)


def _own_experts(
    x_nD: jax.Array,
    experts_nk: jax.Array,
    weights_nk: jax.Array,
    matrices: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    config: ModelConfig,
    how: Execution,
) -> tuple[jax.Array, jax.Array | None]:
    """Add up what a device's own experts, 0 to E, make of tokens.

    Their last biases are left to the caller: devices may share an expert, and what each
    of them makes is added up.
    """
    (n, k), E = experts_nk.shape, matrices[0].shape[0]
    own = experts_nk.reshape(-1)
    own = jnp.where((own >= 0) & (own < E), own, E)  # those of others come last
    order = jnp.argsort(own)
    row_nk = jnp.argsort(order).reshape(n, k)
    sizes_E = jnp.sum(own[:, None] == jnp.arange(E)[None], axis=0, dtype=jnp.int32)
    R = n * min(k, E)
    assigned_R = order[:R]
    x_RD = to_rows(x_nD, assigned_R // k, row_nk)
    weights_R1 = to_rows(weights_nk.reshape(-1, 1), assigned_R, row_nk.reshape(-1, 1))
    up, *gate, down = matrices
    watched = how.taps is not None and how.expert_quantization is not None
    counts = list[jax.Array]()

    def multiply(name: str, x: jax.Array, w: jax.Array) -> jax.Array:
        with part(name), expected(n * k * E // config.num_experts, R):
            if watched:
                rounded = x.astype(how.compute_dtype)
                in_eight = to_float8(rounded, FORWARD, float8_scale(rounded, FORWARD))
                used_R1 = jnp.arange(R)[:, None] < jnp.sum(sizes_E)
                counts.append(count_rounding(rounded, in_eight, used_R1))
            return grouped_product(
                x, w, sizes_E, how.compute_dtype, how.grouped, how.expert_quantization
            )

    inner = [multiply("up", x_RD, up), *(multiply("gate", x_RD, w) for w in gate)]
    if biases:
        is_own_RE = own[assigned_R][:, None] == jnp.arange(E)[None]
        shares_RE = is_own_RE.astype(x_nD.dtype)
        added = (_shared_out(shares_RE, bias, how) for bias in biases)
        inner = [h + bias for h, bias in zip(inner, added, strict=True)]
    h_RF = activate(config, inner[0], inner[1] if gate else None)
    # Weighted here: the gradient of a weight needs no result of the last product.
    h_RF = (h_RF * weights_R1).astype(x_nD.dtype)
    y_nD = from_rows(multiply("down", h_RF, down), assigned_R // k, row_nk)
    return y_nD, jnp.sum(jnp.stack(counts), axis=0) if watched else None


def _shared_out(shares: jax.Array, bias: jax.Array, how: Execution) -> jax.Array:
    """Add up experts' biases [E, F] by shares [M, E].

    A product, since the gradient of rows that are copied would be a scatter.
    """
    with part("bias"):
        return product("me,ef->mf", shares, bias, how.compute_dtype)


@jax.custom_vjp
def to_rows(x_nD: jax.Array, token_R: jax.Array, row_nk: jax.Array) -> jax.Array:
    """Copy each token to its rows. The gradient is no scatter, which is slow.

    Args:
        x_nD: tokens.
        token_R: of each row.
        row_nk: the rows of each token; those from R on are not there.
    """
    return x_nD[token_R]


@jax.custom_vjp
def from_rows(y_RD: jax.Array, token_R: jax.Array, row_nk: jax.Array) -> jax.Array:
    """Add up each token's rows: the transpose of `to_rows` if no one's rows are 0."""
    y_nkD = y_RD.at[row_nk].get(mode="fill", fill_value=0)
    return jnp.sum(y_nkD, axis=1, dtype=jnp.float32).astype(y_RD.dtype)


def _keep(function):
    return lambda x, token, row: (function(x, token, row), (token, row))


to_rows.defvjp(_keep(to_rows), lambda places, dx: (from_rows(dx, *places), None, None))
from_rows.defvjp(
    _keep(from_rows), lambda places, dy: (to_rows(dy, *places), None, None)
)
