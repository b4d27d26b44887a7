"""The parts of a layer: norms, attention, MLP.

Shapes: B batch, T query time, S key time, D embed, N query heads, K key/value heads,
G = N/K, H head dim, F mlp, L layers, V vocab.
"""

import math
from functools import partial
from typing import assert_never

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from model.attention.cache import KeysValues, MixerCache, cached_attention
from model.attention.inputs import Inputs
from model.attention.method import AttentionOptions
from model.choices import Activation, Init, Norm, NormSpan
from model.config import ModelConfig
from model.dropout import drop
from model.execution import CallContext, Execution
from model.linear import Linear
from model.params import Kind, ParamInfo
from model.products import expand_to
from model.remat import saveable
from model.rope import rotate
from model.scopes import part_scope


class Normalize(nnx.Module):
    """LayerNorm or RMSNorm over the last dims, in float32."""

    def __init__(self, config: ModelConfig, kind: Norm, **dims: int):
        """Make a norm over the last dims; `dims` maps logical axes to their sizes."""
        dtype = jnp.dtype(config.param_dtype)
        shape = tuple(dims.values())
        info = ParamInfo(tuple(dims), Kind.vector)
        self.epsilon = config.norm_epsilon
        self.dims = tuple(range(-len(dims), 0))
        self.offset = 1.0 if config.norm_unit_offset else 0.0
        scale = jnp.full(shape, 1.0 - self.offset, dtype)
        self.scale = nnx.Param(scale, info=info)
        self.centred = kind is Norm.layernorm
        zeros = jnp.zeros(shape, dtype)
        biased = self.centred and config.bias
        self.bias = nnx.Param(zeros, info=info) if biased else None

    def keep_input(
        self, x_BTD: Float[Array, "B T D"], execution: Execution
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Return x for the residual, and x normalized.

        Some kernels add both gradients of x in one pass (model/parts/kernels/).
        """
        run_kernel = execution.normalize
        if run_kernel is None or execution.placement.automatic_axes:
            return x_BTD, self(x_BTD)
        bias = None if self.bias is None else self.bias[...]
        scale = self.scale[...] + self.offset
        with part_scope("norm"):
            return run_kernel(x_BTD, scale, bias, self.epsilon, self.centred)

    def __call__(self, x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        """Return x, normalized over its last dims, in the dtype of x."""
        with part_scope("norm"):
            y = x.astype(jnp.float32)
            if self.centred:
                y = y - jnp.mean(y, axis=self.dims, keepdims=True)
            variance = jnp.mean(y * y, axis=self.dims, keepdims=True)
            scale = expand_to(self.scale[...], y.ndim).astype(y.dtype)
            scale = scale + self.offset if self.offset else scale
            y = y * jax.lax.rsqrt(variance + self.epsilon) * scale
            if self.bias is not None:
                y = y + expand_to(self.bias[...], y.ndim).astype(y.dtype)
            return y.astype(x.dtype)


def stds(config: ModelConfig, fan_in: int) -> tuple[float, float]:
    """Return two initial stds: in general, and of matrices into the residual stream.

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
        D = config.embed_dim
        N = config.num_heads
        K = config.kv_heads
        H = config.head_size
        std, _ = stds(config, D)
        _, residual_std = stds(config, N * H)
        dtype = jnp.dtype(config.param_dtype)

        bias = config.bias or config.qkv_bias
        linear_in = partial(Linear, std=std, bias=bias, dtype=dtype, rngs=rngs)
        query_axes, kv_axes = (
            ("embed", head_axis, "head_dim") for head_axis in ("heads", "kv_heads")
        )
        # The projection of queries also gives a gate for each dim of each head.
        self.gated = config.attention_gate
        query_dim = H * (1 + config.attention_gate)
        self.query = linear_in("query", "btd,dnh->btnh", (D, N, query_dim), query_axes)
        self.key = linear_in("key", "btd,dkh->btkh", (D, K, H), kv_axes)
        self.value = linear_in("value", "btd,dkh->btkh", (D, K, H), kv_axes)
        linear_out = partial(Linear, std=residual_std, bias=config.bias, dtype=dtype)
        axes = ("heads", "head_dim", "embed")
        self.output = linear_out("output", "btnh,nhd->btd", (N, H, D), axes, rngs=rngs)

        def make_norm(**num_heads_by_axis: int) -> Normalize | None:
            if not config.qk_norm:
                return None
            over_head = config.qk_norm_over is NormSpan.head
            dims = {"head_dim": H} if over_head else num_heads_by_axis | {"head_dim": H}
            return Normalize(config, Norm.rmsnorm, **dims)

        self.query_norm = make_norm(heads=N)
        self.key_norm = make_norm(kv_heads=K)
        self.query_scale = (H / (config.query_scale_dim or H)) ** 0.5
        self.window = config.window
        self.soft_cap = config.attention_soft_cap
        self.dropout = config.dropout.attention
        info = ParamInfo(("heads",), Kind.vector)
        sinks = config.attention_sinks
        self.sinks = nnx.Param(jnp.zeros((N,), dtype), info=info) if sinks else None

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        execution: Execution,
        call: CallContext,
        cache: MixerCache | None,
        local_flag: Array | bool,
    ) -> tuple[Float[Array, "B T D"], MixerCache | None]:
        """Return the attention over x and cached positions, and the updated cache."""
        assert cache is None or isinstance(cache, KeysValues)
        placement = execution.placement
        compute = execution.numerics.compute_dtype
        q_BTNH = saveable(self.query(x_BTD, execution, call), "query")
        k_BTKH = saveable(self.key(x_BTD, execution, call), "key")
        v_BTKH = saveable(self.value(x_BTD, execution, call), "value")
        q_BTNH = placement.constrain(q_BTNH, "batch", "seq", "heads", "head_dim")
        gate_BTNH = None
        if self.gated:
            q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH = self.query_norm(q_BTNH)
            k_BTKH = self.key_norm(k_BTKH)
        scale = self.query_scale
        if cache is None and not execution.attention.scales_queries:
            scale *= q_BTNH.shape[-1] ** -0.5  # Scaling later would take another pass.
        if scale != 1:
            q_BTNH = q_BTNH * scale
        if call.rotations is not None:
            if placement.platform == "tpu":
                # Otherwise XLA would store the queries before their rotation in
                # float32, the dtype in which they are rotated.
                q_BTNH, k_BTKH = jax.lax.optimization_barrier((q_BTNH, k_BTKH))
            rotation = call.rotations.for_layer(local_flag)
            q_BTNH = rotate(q_BTNH, rotation)
            k_BTKH = rotate(k_BTKH, rotation)
        options = AttentionOptions(
            compute,
            placement,
            window=self.window if local_flag is not False else None,
            local_flag=None if isinstance(local_flag, bool) else local_flag,
            soft_cap=self.soft_cap,
        )
        sinks_N = None if self.sinks is None else self.sinks[...]
        if cache is None:
            drop_weights = partial(drop, rate=self.dropout, site="weights", call=call)
            o_BTNH, bound_N = execution.attention.attend(
                Inputs(q_BTNH, k_BTKH, v_BTKH, call.segment_ids_BT, sinks_N),
                options._replace(drop=drop_weights if self.dropout else None),
            )
            call.note_scores(bound_N)
        else:
            assert isinstance(cache, KeysValues)
            cache = cache.append(k_BTKH, v_BTKH)
            o_BTNH = cached_attention(
                q_BTNH, cache, options, call.trained_length, sinks_N
            )
        if gate_BTNH is not None:
            o_BTNH = o_BTNH * jax.nn.sigmoid(gate_BTNH)
        a_BTD = saveable(self.output(o_BTNH, execution, call), "attention_output")
        return a_BTD, cache

    def empty_cache(
        self, batch: int, length: int, dtype: DTypeLike, first_B: Array | None
    ) -> KeysValues:
        """Return an empty cache for `length` positions of `batch` rows."""
        zeros = jnp.zeros((batch, length, *self.key.weight.shape[-2:]), dtype)
        return KeysValues(zeros, zeros, jnp.int32(0), first_B)


def activate(
    config: ModelConfig,
    h: Float[Array, "*dims F"],
    gate: Float[Array, "*dims F"] | None,
) -> Float[Array, "*dims F"]:
    """Return the MLP's hidden values: activation(h), or activation(gate) h if gated.

    Source: transformers 5.23, models/gpt_oss/modeling_gpt_oss.py, for clamped_swiglu.
    """
    kind = config.activation
    limit = config.swiglu_limit
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
            gate = jnp.minimum(gate, limit)
            h = jnp.clip(h, -limit, limit)
            return gate * jax.nn.sigmoid(config.swiglu_alpha * gate) * (h + 1)
        case _:
            assert_never(kind)


class MLP(nnx.Module):
    """Project D to F, apply the activation and the gate, and project back."""

    def __init__(self, config: ModelConfig, F: int, rngs: nnx.Rngs):
        """Make the projections."""
        D = config.embed_dim
        self.config = config
        std, _ = stds(config, D)
        _, residual_std = stds(config, F)
        dtype = jnp.dtype(config.param_dtype)

        linear = partial(Linear, bias=config.bias, dtype=dtype, rngs=rngs)
        to_hidden = partial(linear, spec="btd,df->btf", shape=(D, F), std=std)
        self.up = to_hidden("up", axes=("embed", "mlp"))
        self.gate = to_hidden("gate", axes=("embed", "mlp")) if config.gated else None
        axes = ("mlp", "embed")
        self.down = linear("down", "btf,fd->btd", (F, D), axes, std=residual_std)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], execution: Execution, call: CallContext
    ) -> Float[Array, "B T D"]:
        """Return the result of the MLP, which treats positions independently."""
        h_BTF = saveable(self.up.multiply(x_BTD, execution, call), "mlp_up")
        gate_BTF = None
        if self.gate is not None:
            gate_BTF = self.gate.multiply(x_BTD, execution, call)
            gate_BTF = saveable(gate_BTF, "mlp_gate")
        run = self._activate
        if execution.placement.platform == "gpu" and execution.remat == "none":
            # Otherwise XLA:GPU stores the sum with the bias, and the derivative, as
            # further arrays of this size.
            run = jax.checkpoint(run)
        h_BTF = run(h_BTF, gate_BTF)
        h_BTF = execution.placement.constrain(h_BTF, "batch", "seq", "mlp")
        return self.down(h_BTF, execution, call)

    def _activate(
        self, h_BTF: Float[Array, "B T F"], gate_BTF: Float[Array, "B T F"] | None
    ) -> Float[Array, "B T F"]:
        """Return the hidden values for the products of `up` and of `gate`."""
        if self.gate is not None and gate_BTF is not None:
            gate_BTF = self.gate.add_bias(gate_BTF)
        return activate(self.config, self.up.add_bias(h_BTF), gate_BTF)
