"""Causal attention within documents by four kernels, on rows that devices may share.

- `xla` runs on every platform and stores the [B, N, T, S] scores in memory.
- `cudnn` is NVIDIA's fused kernel. With documents it also needs a [B, 1, T, S] mask.
- `cudnn_packed` is the same kernel, given the documents' offsets instead of a mask.
- `splash` is jax's Pallas kernel for TPU. It never stores all scores, and it skips
  blocks above the diagonal.

No kernel falls back to another: a feature that a kernel lacks is an error.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
V value dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from data.errors import Mistake
from model.attention.inputs import Attended, Inputs
from model.attention.method import PLAIN_ATTENTION, AttentionOptions
from model.choices import Attention, ContextAttention
from model.parts.context.context_parallel import (
    KERNELS,
    make_context_parallel_attention,
)
from model.parts.context.ring import in_ring_order
from model.parts.kernels import cudnn, splash
from model.placement import Placement

_CUDNN = Attention.cudnn
_PLATFORM_KERNELS = {"tpu": Attention.splash, "cuda": _CUDNN, "gpu": _CUDNN}


def choose_kernel(
    setting: Attention,
    platform: str,
    sequence_length: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    soft_cap: bool = False,
    sinks: bool = False,
    dropout: bool = False,
) -> Attention | Mistake:
    """Return the kernel for a setting; `auto` selects the platform's own kernel.

    The result is a mistake if the kernel cannot compute this attention. `auto` does not
    fall back to a slower kernel either.

    `value_dim` is the dim of a head's values if it differs from that of its queries.
    """
    kernel = setting
    if setting is Attention.auto:
        kernel = _PLATFORM_KERNELS.get(platform, Attention.xla)
    if kernel is Attention.xla:
        return kernel
    rules = [(not dropout, "drops no weights (model.dropout.attention)")]
    if kernel is Attention.splash:
        multiple = splash.LENGTH_MULTIPLE
        length_fits = sequence_length % multiple == 0
        rules += [
            (platform == "tpu", "needs a TPU"),
            (length_fits, f"needs a sequence length divisible by {multiple}"),
        ]
    else:
        length_fits = sequence_length % cudnn.LENGTH_MULTIPLE == 0
        head_dim_fits = head_dim % 8 == 0 and head_dim <= 256
        rules += [
            (platform in ("cuda", "gpu"), "needs an NVIDIA GPU"),
            (head_dim_fits, "needs a head dim that is a multiple of 8, up to 256"),
            ((value_dim or 0) <= head_dim, f"needs model.value_head_dim <= {head_dim}"),
            (length_fits, "needs an even sequence length"),
            (not soft_cap, "does not cap scores (model.attention_soft_cap)"),
            (kernel is _CUDNN or not sinks, "has no sinks (model.attention_sinks)"),
        ]
    for holds, text in rules:
        if not holds:
            rule = f"{kernel} attention {text}; change it, or take "
            rule += "model.attention=xla (slower)"
            return Mistake("model.attention", setting, rule)
    return kernel


@dataclass(frozen=True)
class KernelAttention:
    """Attention by one of four kernels; an `AttentionMethod`.

    kernel: the kernel, which must not be `auto`.
    context: how devices that share rows attend to each other's keys, not `auto`. It is
        only used with a placement in which devices share rows.

    Queries of `splash` are already scaled by 1/sqrt(H); other kernels scale them. V may
    differ from H: for cuDNN, values are padded with zeros if its kernel does not take
    both dims.
    """

    kernel: Attention
    context: ContextAttention | None = None

    @property
    def scales_queries(self) -> bool:
        """Whether the kernel scales queries."""
        return KERNELS[self.kernel].SCALES_QUERIES

    @property
    def in_ring_order(self) -> bool:
        """Whether devices that share a row have the chunks of a ring."""
        if self.context is ContextAttention.all_gather:
            return self.kernel is Attention.splash
        return self.context is ContextAttention.ring

    def arrange(self, x_BT: Array, axes: tuple[str, ...]) -> Array:
        """Arrange positions as `AttentionMethod.arrange` says."""
        return in_ring_order(x_BT, axes) if self.in_ring_order else x_BT

    def attend(self, inputs: Inputs, options: AttentionOptions) -> Attended:
        """Attend as `AttentionMethod.attend` does."""
        placement = options.placement
        if self.kernel is Attention.xla and not placement.sequence_axes:
            return PLAIN_ATTENTION.attend(inputs, options)
        assert options.drop is None, "train/resolve/execution.py refuses dropout here"
        q_BTNH = inputs.q_BTNH
        row_length = q_BTNH.shape[1] * jax.lax.psum(1, placement.sequence_axes)
        window = options.window
        if window is not None and window >= row_length:
            window = None
        q, k, v = (x.astype(options.compute) for x in inputs[:3])
        is_sharded_like_q = placement.spec("heads") == placement.spec("kv_heads")
        kv_axis = "kv_heads" if is_sharded_like_q else "heads"
        if not is_sharded_like_q:
            # A device may lack the key heads of its query heads. Repeat each key head
            # for every query head that shares it, and shard k and v like q.
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        V = v.shape[-1]
        padding = cudnn.value_padding(self.kernel, q.shape[-1], V)
        if padding:
            v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, padding)))
        make_attend = partial(
            self._make_attend_on_shards,
            placement=placement,
            kv_axis=kv_axis,
            soft_cap=options.soft_cap,
        )
        if window is None or options.local_flag is None:
            attend_rows = make_attend(window=window)
        else:
            # A kernel's mask is fixed at compile time. Therefore layers with and
            # without a window take different branches.
            branches = make_attend(window=window), make_attend(window=None)
            attend_rows = partial(jax.lax.cond, options.local_flag, *branches)
        o_BTNV, bound_N = attend_rows(inputs._replace(q_BTNH=q, k_BSKH=k, v_BSKV=v))
        o_BTNV = o_BTNV[..., :V] if padding else o_BTNV
        return Attended(o_BTNV.astype(q_BTNH.dtype), bound_N)

    def _make_attend_on_shards(
        self,
        *,
        window: int | None,
        soft_cap: float | None,
        placement: Placement,
        kv_axis: str,
    ) -> Callable[[Inputs], Attended]:
        """Return a function that runs the kernel on each local shard.

        XLA cannot partition kernels. `kv_axis` is the logical axis of the heads of keys
        and values.
        """
        kernel = KERNELS[self.kernel]
        if placement.sequence_axes:
            assert self.context is not None
            attend = make_context_parallel_attention(
                self.context,
                kernel,
                placement.sequence_axes,
                window=window,
                soft_cap=soft_cap,
                in_ring_order=self.in_ring_order,
                axis_steps=placement.axis_steps,
            )
        else:
            attend = partial(kernel.attend, window=window, soft_cap=soft_cap)
        if not placement.automatic_axes:
            return attend
        q_spec = placement.spec("batch", None, "heads", None)
        kv_spec = placement.spec("batch", None, kv_axis, None)
        ids_spec = placement.spec("batch", None)
        heads_spec = placement.spec("heads")
        specs = Inputs._make([q_spec, kv_spec, kv_spec, ids_spec, heads_spec])
        out_specs = Attended(q_spec, heads_spec)  # pyright: ignore[reportArgumentType]
        return placement.map_shards(attend, in_specs=(specs,), out_specs=out_specs)
