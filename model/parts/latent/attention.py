"""Multi-head latent attention: keys and values of all heads come from one small vector.

    queries:            [nope | rope] = W norm(W x), or W x without `query_rank`
    keys and values:    [c | k_rope] = W x;  [k_nope | v] = W norm(c) for each head

Positions rotate only the `rope` dims, and all heads share k_rope. A latent is norm(c)
and the rotated k_rope. A cache holds latents. Attention to a cache multiplies in
another order, so that it never expands the keys and values of earlier positions:

    scores = [W_k^T q_nope | q_rope] [norm(c) | k_rope]^T
    output = W_v (weights norm(c))

The matrices that expand compressed vectors are sharded by heads over `tensor`, and
their input dim like `embed`. Compressed vectors are replicated over `tensor`. With
`mesh.context_attention=all_gather`, devices that share rows gather latents, and each
expands those of whole rows. With `ring`, latents travel unless products are in eight
bits (model/parts/latent/ring.py). Otherwise devices exchange keys and values.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C.

Shapes: B batch, T query time, S key time, D embed, N heads, C latent dim, H dim of
queries and keys, V value dim.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from model.attention.cache import MixerCache, cached_attention
from model.attention.inputs import Inputs
from model.attention.method import AttentionOptions
from model.choices import Attention, ContextAttention, Norm
from model.config import ModelConfig
from model.dropout import drop
from model.execution import CallContext, Execution
from model.layers import Normalize, stds
from model.linear import Linear
from model.parts.kernels import splash
from model.parts.latent.cache import Latents
from model.parts.latent.ring import attend_in_latent_ring
from model.products import gather_weight, product
from model.remat import saveable
from model.rope import rotate
from model.scopes import part_scope

_EPSILON = 1e-6  # The norms of compressed vectors do not use `norm_epsilon`.


class LatentAttention(nnx.Module):
    """Causal multi-head latent attention inside documents."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Make the projections and the norms of compressed vectors."""
        D = config.embed_dim
        N = config.num_heads
        H = config.head_size
        V = config.value_size
        query_rank = config.query_rank
        kv_rank = config.kv_rank
        self.nope_dim = config.nope_head_dim
        self.kv_rank = kv_rank
        self.query_scale = config.rope_scaling.score_factor
        self.dropout = config.dropout.attention

        dtype = jnp.dtype(config.param_dtype)
        linear = partial(Linear, bias=False, dtype=dtype, rngs=rngs)
        norm = partial(Normalize, replace(config, norm_epsilon=_EPSILON), Norm.rmsnorm)

        def compress(name: str, rank: int) -> Linear:
            axes = ("embed", "head_dim")
            std, _ = stds(config, D)
            return linear(name, "btd,dc->btc", (D, rank), axes, std=std)

        def expand(name: str, num_inputs: int, head_dim: int) -> Linear:
            shape = (num_inputs, N, head_dim)
            std, _ = stds(config, num_inputs)
            axes = ("embed", "heads", "head_dim")
            return linear(name, "btc,cnh->btnh", shape, axes, std=std)

        self.query = None if query_rank else expand("query", D, H)
        self.query_down = compress("query_down", query_rank) if query_rank else None
        self.query_norm = norm(head_dim=query_rank) if query_rank else None
        self.query_up = expand("query_up", query_rank, H) if query_rank else None
        self.key_value_down = compress("key_value_down", kv_rank + config.rope_head_dim)
        self.key_value_norm = norm(head_dim=kv_rank)
        self.key_value_up = expand("key_value_up", kv_rank, config.nope_head_dim + V)
        _, std = stds(config, N * V)
        axes = ("heads", "head_dim", "embed")
        self.output = linear("output", "btnh,nhd->btd", (N, V, D), axes, std=std)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        execution: Execution,
        call: CallContext,
        cache: MixerCache | None,
        local_flag: Array | bool,
    ) -> tuple[Float[Array, "B T D"], MixerCache | None]:
        """Return the attention over x and cached positions, and the updated cache.

        `local_flag` is ignored, because latent attention has no window.
        """
        placement = execution.placement
        rotations = call.rotations
        assert rotations is not None, "model/config_rules.py requires rotary positions"
        q_BTNH = self._queries(x_BTD, execution, call)
        latent_BTC = self.key_value_down(x_BTD, execution, call)
        latent_BTC = saveable(latent_BTC, "latent")
        if placement.platform == "tpu":
            # Otherwise XLA would store the queries before their rotation in float32.
            q_BTNH, latent_BTC = jax.lax.optimization_barrier((q_BTNH, latent_BTC))
        c, k_rope = jnp.split(latent_BTC[:, :, None], [self.kv_rank], axis=-1)
        k_rope = rotate(k_rope, rotations.global_layers)
        latent_BTC = jnp.concatenate([self.key_value_norm(c), k_rope], -1)[:, :, 0]
        latent_BTC = placement.constrain(latent_BTC, "batch", "seq", None)
        q_nope, q_rope = jnp.split(q_BTNH, [self.nope_dim], axis=-1)
        q_rope = rotate(q_rope, rotations.global_layers)
        if cache is None:
            q_BTNH = jnp.concatenate([q_nope, q_rope], axis=-1)
            o_BTNV = self._attend(q_BTNH, latent_BTC, execution, call)
        else:
            assert isinstance(cache, Latents)
            cache = cache.append(latent_BTC)
            o_BTNV = self._attend_to_cache(q_nope, q_rope, cache, execution, call)
        a_BTD = saveable(self.output(o_BTNV, execution, call), "attention_output")
        return a_BTD, cache

    def _queries(
        self, x_BTD: Float[Array, "B T D"], execution: Execution, call: CallContext
    ) -> Float[Array, "B T N H"]:
        """Return the scaled queries before their rotation."""
        if self.query is not None:
            q_BTNH = self.query(x_BTD, execution, call)
        else:
            assert self.query_down is not None
            assert self.query_norm is not None
            assert self.query_up is not None
            x_BTC = saveable(self.query_down(x_BTD, execution, call), "latent")
            q_BTNH = self.query_up(self.query_norm(x_BTC), execution, call)
        constrain = execution.placement.constrain
        q_BTNH = constrain(saveable(q_BTNH, "query"), "batch", "seq", "heads", None)
        return q_BTNH if self.query_scale == 1 else q_BTNH * self.query_scale

    def _attend(
        self,
        q_BTNH: Float[Array, "B T N H"],
        latent_BTC: Float[Array, "B T C"],
        execution: Execution,
        call: CallContext,
    ) -> Float[Array, "B T N V"]:
        """Attend to the keys and values that are expanded from the row's latents."""
        if not execution.attention.scales_queries:
            q_BTNH = q_BTNH * q_BTNH.shape[-1] ** -0.5
        numerics = execution.numerics
        method = execution.attention.context
        is_quantized = numerics.quantization and not call.high_precision
        is_ring = method is ContextAttention.ring and execution.placement.sequence_axes
        if is_ring and not is_quantized:
            up = self.key_value_up
            with part_scope(up.name):
                placement = execution.weight_placement(up.axes)
                weight: Any = gather_weight(
                    up.weight[...], placement, numerics.compute_dtype, None
                )
            o_BTNV, bound_N = attend_in_latent_ring(
                q_BTNH,
                latent_BTC,
                weight,
                call.segment_ids_BT,
                nope_dim=self.nope_dim,
                execution=execution,
            )
            call.note_scores(bound_N)
            return o_BTNV
        latent_BSC = _gather_positions(latent_BTC, execution)
        c_BSC, k_rope = jnp.split(latent_BSC, [self.kv_rank], axis=-1)
        kv = self.key_value_up(c_BSC, execution, call)
        k_nope, v_BSNV = jnp.split(kv, [self.nope_dim], axis=-1)
        k_nope = saveable(k_nope, "key")
        v_BSNV = saveable(v_BSNV, "value")
        shape = *k_nope.shape[:3], k_rope.shape[-1]
        k_rope = jnp.broadcast_to(k_rope[:, :, None], shape)
        drop_weights = partial(drop, rate=self.dropout, site="weights", call=call)
        k_BSNH = jnp.concatenate([k_nope, k_rope], axis=-1)
        o_BTNV, bound_N = execution.attention.attend(
            Inputs(q_BTNH, k_BSNH, v_BSNV, call.segment_ids_BT),
            AttentionOptions(
                execution.numerics.compute_dtype,
                execution.placement,
                drop=drop_weights if self.dropout else None,
            ),
        )
        call.note_scores(bound_N)
        return o_BTNV

    def _attend_to_cache(
        self,
        q_nope: Float[Array, "B T N _"],
        q_rope: Float[Array, "B T N _"],
        cache: Latents,
        execution: Execution,
        call: CallContext,
    ) -> Float[Array, "B T N V"]:
        """Attend to latents: one key head, whose values are its keys' first dims."""
        compute = execution.numerics.compute_dtype
        weight = self.key_value_up.weight[...]
        weight_k, weight_v = jnp.split(weight, [self.nope_dim], axis=-1)
        q_latent = product("btnh,cnh->btnc", q_nope, weight_k, compute)
        q_BTNC = jnp.concatenate([q_latent, q_rope], axis=-1)
        head_dim = q_nope.shape[-1] + q_rope.shape[-1]
        scale = (q_BTNC.shape[-1] / head_dim) ** 0.5  # The kernel assumes its own dim.
        o_BTNC = cached_attention(
            q_BTNC * scale,
            cache.as_keys_values(self.kv_rank),
            AttentionOptions(compute),
            call.trained_length,
        )
        return product("btnc,cnv->btnv", o_BTNC, weight_v, compute)

    def empty_cache(
        self, batch: int, length: int, dtype: DTypeLike, first_B: Array | None
    ) -> Latents:
        """Return an empty cache for `length` positions of `batch` rows."""
        size = self.key_value_down.weight.shape[-1]
        zeros = jnp.zeros((batch, length, size), dtype)
        return Latents(zeros, jnp.int32(0), first_B)


def _gather_positions(
    latent_BTC: Float[Array, "B T C"], execution: Execution
) -> Float[Array, "B S C"]:
    """Return the latents of whole rows if devices gather keys, otherwise local ones."""
    axes = execution.placement.sequence_axes
    gathers = execution.attention.context is ContextAttention.all_gather
    # Stochastic rounding has random keys for local positions only.
    if not axes or not gathers or execution.numerics.rounds_stochastically:
        return latent_BTC
    if execution.attention.kernel is not Attention.splash:
        return jax.lax.all_gather(latent_BTC, axes, axis=1, tiled=True)
    steps = execution.placement.axis_steps
    return splash.gather_positions(latent_BTC[:, None], axes, steps)[:, 0]
