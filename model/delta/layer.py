"""The gated delta net: a mixer with the call signature of `SelfAttention`.

Queries, keys and values pass through a short convolution. They then update and read a
state of fixed size (model/delta/rule.py), which also knows the order of positions.

Source: arXiv:2412.06464; initial decays: Mamba, arXiv:2312.00752, section 3.6.

Shapes: B batch, T time, D embed, K key heads, R value heads of a key head, N = K R
value heads, H key dim, V value dim, W taps of the convolution.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from model.attention.cache import DeltaState, LayerCache
from model.choices import Intermediate, Norm
from model.config import ModelConfig
from model.delta.convolution import convolve, last_inputs
from model.delta.pieces import RowPieces, document_starts, row_pieces
from model.delta.rule import DeltaInputs, delta_chunks, delta_step
from model.execution import CallContext, Execution
from model.layers import Normalize, stds
from model.linear import Linear
from model.params import Kind, ParamInfo
from model.remat import saveable
from model.scopes import part_scope

_DECAYS = 1.0, 16.0  # The decay of a unit step is drawn from this range,
_STEPS = 1e-3, 1e-1  # and the logarithm of a step between those of these two.
_EPSILON = 1e-6  # added to the squared norm of queries and keys


class GatedDeltaNet(nnx.Module):
    """A causal mixer inside documents, with a state instead of keys and values."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Make the projections, the convolutions, the decays and the output's norm."""
        self.sizes, D, W = config.delta_sizes, config.embed_dim, config.delta_conv_width
        K, N, H, V = self.sizes
        std, _ = stds(config, D)
        _, residual_std = stds(config, N * V)
        dtype = jnp.dtype(config.param_dtype)
        linear = partial(Linear, bias=config.bias, dtype=dtype, rngs=rngs)

        def project(name: str, heads: int, dim: int) -> Linear:
            axes = ("embed", "heads", "head_dim")
            return linear(name, "btd,dnh->btnh", (D, heads, dim), axes, std=std)

        def project_to_scalars(name: str) -> Linear:
            return linear(name, "btd,dn->btn", (D, N), ("embed", "heads"), std=std)

        def uniform(low: float, high: float, shape: tuple[int, ...]) -> jax.Array:
            key = rngs.params()
            return jax.random.uniform(key, shape, jnp.float32, low, high)

        def vector(values: jax.Array, *axes: str | None) -> nnx.Param:
            return nnx.Param(values, info=ParamInfo(axes, Kind.vector))

        def make_taps(heads: int, dim: int) -> nnx.Param:
            taps = uniform(-(W**-0.5), W**-0.5, (heads, dim, W)).astype(dtype)
            return vector(taps, "heads", "head_dim", None)

        self.query, self.key = project("query", K, H), project("key", K, H)
        self.value, self.gate = project("value", N, V), project("gate", N, V)
        self.query_taps, self.key_taps = make_taps(K, H), make_taps(K, H)
        self.value_taps = make_taps(N, V)
        self.beta, self.dt = project_to_scalars("beta"), project_to_scalars("dt")
        # These two stay in float32: rounding them would change all decays.
        self.A_log = vector(jnp.log(uniform(*_DECAYS, shape=(N,))), "heads")
        dt = jnp.exp(uniform(*map(math.log, _STEPS), shape=(N,)))
        self.dt_bias = vector(jnp.log(jnp.expm1(dt)), "heads")
        plain = replace(config, norm_unit_offset=False)
        self.output_norm = Normalize(plain, Norm.rmsnorm, head_dim=V)
        spec, axes = "btnh,nhd->btd", ("heads", "head_dim", "embed")
        self.output = linear("output", spec, (N, V, D), axes, std=residual_std)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        execution: Execution,
        call: CallContext,
        cache: LayerCache | None,
        local_flag: Array | bool,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Return the layer's output, and the updated cache. `local_flag` is unused."""
        assert cache is None or isinstance(cache, DeltaState)
        pieces = row_pieces(execution)
        starts_BT = document_starts(x_BTD, call, cache, pieces)
        (q_BTKH, k_BTKH, v_BTNV), last = self._project(
            x_BTD, execution, call, cache, starts_BT=starts_BT, pieces=pieces
        )
        beta_BTN, g_BTN = map(pieces.split, self._rates(x_BTD, execution, call))

        def by_key_head(x_BTN: jax.Array) -> jax.Array:
            B, T, _, *dims = x_BTN.shape
            return x_BTN.reshape(B, T, self.sizes.key_heads, -1, *dims)

        inputs = DeltaInputs(
            queries=_normalize(q_BTKH) * self.sizes.key_dim**-0.5,
            keys=_normalize(k_BTKH),
            values=by_key_head(v_BTNV.astype(jnp.float32)),
            decay=by_key_head(g_BTN),
            rate=by_key_head(beta_BTN),
            starts=starts_BT,
        )
        state, T = pieces.state_before if pieces.axes else None, x_BTD.shape[1]
        with part_scope("delta"):
            if cache is not None and T == 1:
                o_BTKRV, state = delta_step(inputs, cache.state)
            else:
                compute = execution.numerics.compute_dtype
                state = state if cache is None else cache.state
                o_BTKRV, state = delta_chunks(inputs, state, compute)
        if cache is not None:
            q, k, v = last
            cache = cache._replace(
                state=state, queries=q, keys=k, values=v, length=cache.length + T
            )
        z_BTNV = self.gate(x_BTD, execution, call)
        o_BTNV = pieces.join(o_BTKRV).reshape(z_BTNV.shape)
        o_BTNV = self.output_norm(o_BTNV) * jax.nn.silu(z_BTNV.astype(jnp.float32))
        y_BTD = self.output(o_BTNV.astype(x_BTD.dtype), execution, call)
        return saveable(y_BTD, "attention_output"), cache

    def _project(
        self,
        x_BTD: jax.Array,
        execution: Execution,
        call: CallContext,
        cache: DeltaState | None,
        *,
        starts_BT: jax.Array,
        pieces: RowPieces,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return queries, keys and values of each piece, and the last inputs of each.

        These are the last inputs of the convolutions.
        """
        documents_BT = jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32)
        results, last = list[jax.Array](), list[jax.Array]()
        projections: tuple[tuple[Intermediate, Linear, Any, Any], ...] = (
            ("query", self.query, self.query_taps, cache and cache.queries),
            ("key", self.key, self.key_taps, cache and cache.keys),
            ("value", self.value, self.value_taps, cache and cache.values),
        )
        for name, linear, taps, cached in projections:
            y = saveable(linear(x_BTD, execution, call), name)
            y = execution.placement.constrain(y, "batch", "seq", "heads", "head_dim")
            y = pieces.split(y)
            earlier = cached
            if earlier is None:
                shape = len(y), taps.shape[-1] - 1, *y.shape[2:]
                earlier = jnp.zeros(shape, y.dtype)
                earlier = pieces.previous(last_inputs(y, earlier, documents_BT))
            with part_scope("convolution"):
                results.append(convolve(y, earlier, documents_BT, taps[...]))
                last.append(last_inputs(y, earlier, documents_BT))
        return results, last

    def _rates(
        self, x_BTD: jax.Array, execution: Execution, call: CallContext
    ) -> tuple[jax.Array, jax.Array]:
        """Return beta, and the logarithms g of the decays, both float32 [B, T, N]."""
        # A rounded g would change the decay over all later positions.
        x_BTD, call = x_BTD.astype(jnp.float32), call._replace(high_precision=True)
        dt_BTN = self.dt(x_BTD, execution, call)
        dt_BTN = jax.nn.softplus(dt_BTN + self.dt_bias[...][None, None])
        g_BTN = -jnp.exp(self.A_log[...])[None, None] * dt_BTN
        return jax.nn.sigmoid(self.beta(x_BTD, execution, call)), g_BTN

    def empty_cache(
        self, batch: int, length: int, dtype: DTypeLike, first_B: Array | None
    ) -> DeltaState:
        """Return a cache of no positions. Its size does not depend on `length`."""
        (K, N, H, V), E = self.sizes, self.query_taps.shape[-1] - 1
        state = jnp.zeros((batch, K, N // K, H, V), jnp.float32)
        k, v = (jnp.zeros((batch, E, *dims), dtype) for dims in ((K, H), (N, V)))
        return DeltaState(
            state, queries=k, keys=k, values=v, length=jnp.int32(0), first_B=first_B
        )


def _normalize(x: Float[Array, "*dims H"]) -> Float[Array, "*dims H"]:
    """Return float32 vectors of norm 1."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPSILON)
