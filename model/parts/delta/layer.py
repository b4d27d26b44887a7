"""The gated delta net: a mixer with the call signature of `SelfAttention`.

Queries, keys and values pass through a short convolution. They then update and read a
state of fixed size (`rule.py`), which also knows the order of positions.

Source: arXiv:2412.06464; initial decays: Mamba, arXiv:2312.00752, section 3.6.

Shapes: B batch, T time, D embed, K key heads, R value heads of a key head, N = K R
value heads, H key dim, V value dim, W taps of the convolution.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from model.attention.cache import MixerCache
from model.choices import Intermediate, Norm
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.layers import Normalize, stds
from model.linear import Linear
from model.params import Kind, ParamInfo
from model.parts.context.row_pieces import RowPieces, row_pieces
from model.parts.delta.cache import DeltaState
from model.parts.delta.convolution import convolve
from model.parts.delta.rule import AffineMap, DeltaInputs, delta_rule
from model.remat import saveable
from model.scopes import part_scope

_DECAYS = 1.0, 16.0  # The decay of a unit step is drawn from this range,
_STEPS = 1e-3, 1e-1  # and the logarithm of a step between those of these two.
_EPSILON = 1e-6  # added to the squared norm of queries and keys


class GatedDeltaNet(nnx.Module):
    """A causal mixer inside documents, with a state instead of keys and values."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Make the projections, the convolutions, the decays and the output's norm."""
        self.sizes = config.delta_sizes
        D = config.embed_dim
        W = config.delta_conv_width
        K, N, H, V = self.sizes
        std, _ = stds(config, D)
        _, residual_std = stds(config, N * V)
        dtype = jnp.dtype(config.param_dtype)
        linear = partial(Linear, bias=config.bias, dtype=dtype, rngs=rngs)

        def project(name: str, heads: int, dim: int) -> Linear:
            axes = ("embed", "heads", "head_dim")
            return linear(name, "btd,dnh->btnh", (D, heads, dim), axes, std=std)

        def project_to_rates(name: str) -> Linear:
            return linear(name, "btd,dn->btn", (D, N), ("embed", "heads"), std=std)

        def uniform(low: float, high: float, shape: tuple[int, ...]) -> jax.Array:
            key = rngs.params()
            return jax.random.uniform(key, shape, jnp.float32, low, high)

        def vector(values: jax.Array, *axes: str | None) -> nnx.Param:
            return nnx.Param(values, info=ParamInfo(axes, Kind.vector))

        def make_taps(heads: int, dim: int) -> nnx.Param:
            taps = uniform(-(W**-0.5), W**-0.5, (heads, dim, W)).astype(dtype)
            return vector(taps, "heads", "head_dim", None)

        self.query = project("query", K, H)
        self.key = project("key", K, H)
        self.value = project("value", N, V)
        self.gate = project("gate", N, V)
        self.query_taps = make_taps(K, H)
        self.key_taps = make_taps(K, H)
        self.value_taps = make_taps(N, V)
        self.beta = project_to_rates("beta")
        self.dt = project_to_rates("dt")
        # These two stay in float32: rounding them would change all decays.
        self.A_log = vector(jnp.log(uniform(*_DECAYS, shape=(N,))), "heads")
        dt = jnp.exp(uniform(*map(math.log, _STEPS), shape=(N,)))
        self.dt_bias = vector(jnp.log(jnp.expm1(dt)), "heads")
        plain = replace(config, norm_unit_offset=False)
        self.output_norm = Normalize(plain, Norm.rmsnorm, head_dim=V)
        spec = "btnh,nhd->btd"
        axes = ("heads", "head_dim", "embed")
        self.output = linear("output", spec, (N, V, D), axes, std=residual_std)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        execution: Execution,
        call: CallContext,
        cache: MixerCache | None,
        local_flag: Array | bool,
    ) -> tuple[Float[Array, "B T D"], MixerCache | None]:
        """Return the layer's output, and the updated cache. `local_flag` is unused."""
        assert cache is None or isinstance(cache, DeltaState)

        def project(linear: Linear, name: Intermediate) -> jax.Array:
            y = saveable(linear(x_BTD, execution, call), name)
            return execution.placement.constrain(y, "batch", "seq", "heads", "head_dim")

        # Both rates are in float32: a rounded decay would change all later positions.
        x_exact = x_BTD.astype(jnp.float32)
        exact = call._replace(high_precision=True)
        dt_BTN = self.dt(x_exact, execution, exact) + self.dt_bias[...][None, None]
        g_BTN = -jnp.exp(self.A_log[...])[None, None] * jax.nn.softplus(dt_BTN)
        beta_BTN = jax.nn.sigmoid(self.beta(x_exact, execution, exact))
        q = project(self.query, "query")
        k = project(self.key, "key")
        v = project(self.value, "value")
        z_BTNV = self.gate(x_BTD, execution, call)

        def mix(projections: tuple[jax.Array, ...], z_BTNV: jax.Array, cache):
            pieces = row_pieces(execution)
            on_tpu = execution.placement.platform == "tpu"
            o_BTNV, cache = self._apply_rule(
                projections,
                call.segment_ids_BT,
                cache,
                pieces=pieces,
                compute=execution.numerics.compute_dtype,
                # XLA:TPU keeps the arrays of one chunk in a core's own memory. A GPU
                # would start hundreds of small kernels.
                chunks_at_once=1 if on_tpu else None,
            )
            o_BTNV = self.output_norm(o_BTNV) * jax.nn.silu(z_BTNV.astype(jnp.float32))
            return o_BTNV.astype(x_BTD.dtype), cache

        if execution.remat == "none":
            # The arrays of all chunks take far more memory than what they come from.
            mix = jax.checkpoint(mix)
        o_BTNV, cache = mix((q, k, v, g_BTN, beta_BTN), z_BTNV, cache)
        y_BTD = self.output(o_BTNV, execution, call)
        return saveable(y_BTD, "attention_output"), cache

    def _apply_rule(
        self,
        projections: tuple[jax.Array, ...],
        segment_ids_BT: jax.Array | None,
        cache: DeltaState | None,
        *,
        pieces: RowPieces,
        compute: DTypeLike,
        chunks_at_once: int | None,
    ) -> tuple[jax.Array, DeltaState | None]:
        """Return the float32 output of the rule [B, T, N, V], and the updated cache."""
        *qkv, g_BTN, beta_BTN = map(pieces.split, projections)
        B, T, N = g_BTN.shape
        V = self.sizes.value_dim
        E = self.query_taps.shape[-1] - 1
        if cache is None:
            qkv = [pieces.prepend(x, E) for x in qkv]
            ids_BS = jnp.zeros((B, E + T), jnp.int32)
            if segment_ids_BT is not None:
                ids_BS = pieces.prepend(pieces.split(segment_ids_BT), E)
        else:
            pairs = zip(cache.inputs, qkv, strict=True)
            qkv = [jnp.concatenate(pair, axis=1) for pair in pairs]
            first_B1 = 0 if cache.first_B is None else cache.first_B[:, None]
            is_in_row = cache.length + jnp.arange(-E, T)[None] >= first_B1
            ids_BS = jnp.broadcast_to(is_in_row, (B, E + T)).astype(jnp.int32)
        inputs = self._rule_inputs(qkv, ids_BS, g_BTN, beta_BTN)
        with part_scope("delta"):
            if cache is not None:
                state = cache.state
            elif pieces.axes:
                state = partial(_state_before, pieces)
            else:
                state = self._empty_state(B)
            o_BTKRV, state = delta_rule(inputs, state, compute, chunks_at_once)
        if cache is not None:
            q, k, v = (x[:, -E:] for x in qkv)
            cache = cache._replace(
                state=state, inputs=(q, k, v), length=cache.length + T
            )
        return pieces.join(o_BTKRV.reshape(B, T, N, V)), cache

    def _rule_inputs(
        self,
        qkv: list[jax.Array],
        ids_BS: jax.Array,
        g_BTN: jax.Array,
        beta_BTN: jax.Array,
    ) -> DeltaInputs:
        """Return the operands of the rule, at the last T of S positions."""
        T = g_BTN.shape[1]
        taps = self.query_taps[...], self.key_taps[...], self.value_taps[...]
        with part_scope("convolution"):
            pairs = zip(qkv, taps, strict=True)
            q, k, v = (convolve(x, ids_BS, tap) for x, tap in pairs)

        def by_key_head(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], self.sizes.key_heads, -1, *x.shape[3:])

        return DeltaInputs(
            queries=_normalize(q) * self.sizes.key_dim**-0.5,
            keys=_normalize(k),
            values=by_key_head(v.astype(jnp.float32)),
            decay=by_key_head(g_BTN),
            rate=by_key_head(beta_BTN),
            starts=ids_BS[:, -T:] != ids_BS[:, -T - 1 : -1],
        )

    def empty_cache(
        self, batch: int, length: int, dtype: DTypeLike, first_B: Array | None
    ) -> DeltaState:
        """Return a cache of no positions. Its size does not depend on `length`."""
        K, N, H, V = self.sizes
        E = self.query_taps.shape[-1] - 1
        k, v = (jnp.zeros((batch, E, *dims), dtype) for dims in ((K, H), (N, V)))
        return DeltaState(self._empty_state(batch), (k, k, v), jnp.int32(0), first_B)

    def _empty_state(self, batch: int) -> Float[Array, "B K R H V"]:
        K, N, H, V = self.sizes
        return jnp.zeros((batch, K, N // K, H, V))


def _state_before(pieces: RowPieces, local_map: AffineMap) -> Float[Array, "..."]:
    """Return the state before each local piece, from the maps of all earlier pieces."""
    maps = AffineMap(*map(pieces.gather, local_map))
    state = jnp.zeros_like(maps.offset[0])
    _, states = jax.lax.scan(lambda s, piece: (piece(s), s), state, maps)
    return pieces.take_local(states)


def _normalize(x: Float[Array, "*dims H"]) -> Float[Array, "*dims H"]:
    """Return float32 vectors of norm 1."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPSILON)
