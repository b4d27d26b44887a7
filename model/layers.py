"""The parts of a layer: norms, attention, MLP.

Shapes: B batch, T query time, S key time, D embed, N query heads, K key/value heads,
G = N/K, H head dim, F mlp, L layers, V vocab.
"""

import math
from functools import partial
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.attention.cache import KeysValues, cached_attention
from model.attention.kernel import attention
from model.attention.masks import Local
from model.choices import Activation, Init, Norm, NormSpan
from model.config import ModelConfig
from model.dropout import drop
from model.execution import CallContext, Execution
from model.linear import Linear, leading
from model.params import Kind, ParamInfo
from model.remat import saveable
from model.rope import Rotations, rotate
from model.scopes import part_scope


class Normalize(nnx.Module):
    """LayerNorm or RMSNorm over the last dims, in float32."""

    def __init__(self, config: ModelConfig, kind: Norm, **dims: int):
        """Start as the identity scale, over dims that are given by their axes."""
        dtype, shape = jnp.dtype(config.param_dtype), tuple(dims.values())
        info = ParamInfo(tuple(dims), Kind.vector)
        self.epsilon = config.norm_epsilon
        self.over = tuple(range(-len(dims), 0))
        self.offset = 1.0 if config.norm_unit_offset else 0.0
        scale = jnp.full(shape, 1.0 - self.offset, dtype)
        self.scale = nnx.Param(scale, info=info)
        match kind:
            case Norm.layernorm:
                self.centred, biased = True, config.bias
            case Norm.rmsnorm:
                self.centred, biased = False, False
            case _:
                assert_never(kind)
        zeros = jnp.zeros(shape, dtype)
        self.bias = nnx.Param(zeros, info=info) if biased else None

    def __call__(self, x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        """Normalize x over its last dims; the dtype stays."""
        with part_scope("norm"):
            y = x.astype(jnp.float32)
            if self.centred:
                y = y - jnp.mean(y, axis=self.over, keepdims=True)
            variance = jnp.mean(y * y, axis=self.over, keepdims=True)
            scale = leading(self.scale[...], y.ndim).astype(y.dtype)
            scale = scale + self.offset if self.offset else scale
            y = y * jax.lax.rsqrt(variance + self.epsilon) * scale
            if self.bias is not None:
                y = y + leading(self.bias[...], y.ndim).astype(y.dtype)
            return y.astype(x.dtype)


def stds(config: ModelConfig, fan_in: int) -> tuple[float, float]:
    """Initial standard deviation of a matrix: inside, and into the residual stream.

    Source: GPT-2 report, section 2.3, for the factor 1/sqrt(2 L).
    """
    depth = math.sqrt(2 * config.num_layers)
    match config.init:
        case Init.gpt2:
            return 0.02, 0.02 / depth
        case Init.scaled:
            return fan_in**-0.5, fan_in**-0.5 / depth
        case Init.zero:
            return fan_in**-0.5, 0.0
        case _:
            assert_never(config.init)


class SelfAttention(nnx.Module):
    """Causal grouped-query attention inside documents."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Make the projections."""
        D, N, K = config.embed_dim, config.num_heads, config.kv_heads
        H = config.head_size
        std, _ = stds(config, D)
        _, residual_std = stds(config, N * H)
        common = {"dtype": jnp.dtype(config.param_dtype), "rngs": rngs}
        inward = common | {"std": std, "bias": config.bias or config.qkv_bias}
        heads, kv = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.query = Linear("query", "btd,dnh->btnh", (D, N, H), heads, **inward)
        self.key = Linear("key", "btd,dkh->btkh", (D, K, H), kv, **inward)
        self.value = Linear("value", "btd,dkh->btkh", (D, K, H), kv, **inward)
        outward = common | {"std": residual_std, "bias": config.bias}
        out = ("heads", "head_dim", "embed")
        self.output = Linear("output", "btnh,nhd->btd", (N, H, D), out, **outward)

        def norm(**heads: int) -> Normalize | None:
            match config.qk_norm_over:
                case NormSpan.projection:
                    dims = heads | {"head_dim": H}
                case NormSpan.head:
                    dims = {"head_dim": H}
                case _:
                    assert_never(config.qk_norm_over)
            return Normalize(config, Norm.rmsnorm, **dims) if config.qk_norm else None

        self.query_norm, self.key_norm = norm(heads=N), norm(kv_heads=K)
        self.query_scale = (H / (config.query_scale_dim or H)) ** 0.5
        self.window, self.soft_cap = config.window, config.attention_soft_cap
        self.dropout = config.dropout.attention
        sinks_N = jnp.zeros((N,), jnp.dtype(config.param_dtype))
        info = ParamInfo(("heads",), Kind.vector)
        self.sinks = nnx.Param(sinks_N, info=info) if config.attention_sinks else None

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        by: Rotations | None,
        segment_ids_BT: Int[Array, "B T"] | None,
        execution: Execution,
        call: CallContext,
        cache: KeysValues | None,
        local: Local | bool,
    ) -> tuple[Float[Array, "B T D"], KeysValues | None]:
        """Attend; with a cache, also to what came before x, and give the longer one.

        A local layer sees as far as the window, the others all.
        """
        q_BTNH = saveable(self.query(x_BTD, execution, call), "query")
        k_BTKH = saveable(self.key(x_BTD, execution, call), "key")
        v_BTKH = saveable(self.value(x_BTD, execution, call), "value")
        placement, numerics = execution.placement, execution.numerics
        q_BTNH = placement.constrain(q_BTNH, "batch", "seq", "heads", "head_dim")
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if self.query_scale != 1:
            q_BTNH = q_BTNH * self.query_scale
        if by is not None:
            own = by.of(local)
            q_BTNH, k_BTKH = rotate(q_BTNH, own), rotate(k_BTKH, own)
        seen: dict[str, Any] = {
            "window": self.window if local is not False else None,
            "local": None if isinstance(local, bool) else local,
            "soft_cap": self.soft_cap,
            "sinks_N": None if self.sinks is None else self.sinks[...],
        }
        weights = {"rate": self.dropout, "place": "weights", "call": call}
        if cache is None:
            o_BTNH = attention(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                segment_ids_BT,
                implementation=execution.attention,
                compute=numerics.compute_dtype,
                placement=placement,
                context=execution.context_attention,
                drop=partial(drop, **weights) if self.dropout else None,
                **seen,
            )
        else:
            cache = cache.append(k_BTKH, v_BTKH)
            o_BTNH = cached_attention(
                q_BTNH, cache, numerics.compute_dtype, call.trained_length, **seen
            )
        a_BTD = saveable(self.output(o_BTNH, execution, call), "attention_output")
        return a_BTD, cache


def activate(
    config: ModelConfig,
    h: Float[Array, "*dims F"],
    gate: Float[Array, "*dims F"] | None,
) -> Float[Array, "*dims F"]:
    """Apply the non-linearity of an MLP; with a gate it is the gate's.

    Source: transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, for clamped_swiglu.
    """
    kind, limit = config.activation, config.swiglu_limit
    match kind:
        case Activation.gelu:
            return jax.nn.gelu(h, approximate=True)
        case Activation.relu2:
            return jnp.square(jax.nn.relu(h))
        case Activation.swiglu:
            assert gate is not None
            return jax.nn.silu(gate) * h
        case Activation.geglu:
            assert gate is not None
            return jax.nn.gelu(gate, approximate=True) * h
        case Activation.clamped_swiglu:
            assert gate is not None
            gate, h = jnp.minimum(gate, limit), jnp.clip(h, -limit, limit)
            return gate * jax.nn.sigmoid(config.swiglu_alpha * gate) * (h + 1)
        case _:
            assert_never(kind)


class MLP(nnx.Module):
    """Project D to F, apply the activation (with a gate, for SwiGLU), project back."""

    def __init__(self, config: ModelConfig, F: int, rngs: nnx.Rngs):
        """Make the projections."""
        D = config.embed_dim
        std, _ = stds(config, D)
        _, residual_std = stds(config, F)
        common = {
            "bias": config.bias,
            "dtype": jnp.dtype(config.param_dtype),
            "rngs": rngs,
        }
        self.config = config
        widen = ("btd,df->btf", (D, F), ("embed", "mlp"))
        self.up = Linear("up", *widen, std=std, **common)
        gate = config.gated
        self.gate = Linear("gate", *widen, std=std, **common) if gate else None
        self.down = Linear(
            "down", "btf,fd->btd", (F, D), ("mlp", "embed"), std=residual_std, **common
        )

    def __call__(
        self, x_BTD: Float[Array, "B T D"], execution: Execution, call: CallContext
    ) -> Float[Array, "B T D"]:
        """Apply position by position."""
        h_BTF = saveable(self.up(x_BTD, execution, call), "mlp_up")
        gate_BTF = None
        if self.gate is not None:
            gate_BTF = saveable(self.gate(x_BTD, execution, call), "mlp_gate")
        h_BTF = activate(self.config, h_BTF, gate_BTF)
        h_BTF = execution.placement.constrain(h_BTF, "batch", "seq", "mlp")
        return self.down(h_BTF, execution, call)
