"""Attention of rows that devices share, each having T of their S positions.

`ring` sends keys and values from device to device (model/attention/ring.py); of local
layers only those that a window reaches (model/attention/window.py). `ulysses` exchanges
positions for heads: each device attends as if it were alone, to whole rows of some
heads. `all_gather` brings the keys and values of all to each device; its mask depends
on the device, so of the kernels only `xla` takes it.

Source: DeepSpeed Ulysses, arXiv:2309.14509; `all_gather`: Llama 3, arXiv:2407.21783,
section 3.3.2.

Shapes: B batch, T positions of a device, S of all, N query heads, K key/value heads,
H head dim.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.attention import cudnn, cudnn_packed, masks, splash, xla
from model.attention.ring import Kernel, ring
from model.attention.window import attend_in_window
from model.choices import Attention, ContextAttention

Attend = Callable[[Array, Array, Array, Array | None, Array | None], Array]
KERNELS = {
    Attention.xla: xla,
    Attention.cudnn: cudnn,
    Attention.cudnn_packed: cudnn_packed,
    Attention.splash: splash,
}


def why_not(
    way: ContextAttention,
    kernel: Attention,
    devices: int,
    sequence_length: int,
    kv_heads: int,
) -> str | None:
    """Return why devices cannot attend so, or None where they can.

    Args:
        way: not `auto`.
        kernel: that they run.
        devices: that share a row.
        sequence_length: of a row.
        kv_heads: key and value heads of a device, as `tensor` cuts them.
    """
    multiple = devices
    if way is ContextAttention.ring:
        multiple = 2 * devices * KERNELS[kernel].MULTIPLE
    if way is ContextAttention.ulysses and kv_heads % devices:
        return (
            f"ulysses needs the {kv_heads} key and value heads of a device to be "
            f"divisible by mesh.context={devices}"
        )
    if way is ContextAttention.ring and kernel is Attention.cudnn_packed:
        return "ring needs model.attention=cudnn, whose masks are of two chunks of rows"
    if way is ContextAttention.all_gather and kernel is not Attention.xla:
        return f"all_gather needs model.attention=xla, not {kernel}"
    if sequence_length % multiple:
        return (
            f"{way} over {devices} devices with {kernel} attention needs a "
            f"data.sequence_length divisible by {multiple}, not {sequence_length}"
        )
    return None


def choose(
    asked: ContextAttention,
    kernel: Attention,
    devices: int,
    sequence_length: int,
    kv_heads: int,
) -> ContextAttention:
    """Choose how devices attend, arguments as in `why_not`.

    Raises:
        ValueError: if it cannot serve; with `auto`, if nothing can.
    """
    auto = ContextAttention.auto
    ways = [way for way in ContextAttention if asked in (auto, way) and way is not auto]
    reasons = []
    for way in ways:
        reason = why_not(way, kernel, devices, sequence_length, kv_heads)
        if reason is None:
            return way
        reasons.append(reason)
    raise ValueError("; ".join(reasons))


def attend(
    way: ContextAttention,
    kernel: ModuleType,
    axes: tuple[str, ...],
    window: int | None,
    soft_cap: float | None,
) -> Attend:
    """Return attention on a device's own rows, heads and positions.

    Args:
        way: not `auto`.
        kernel: the kernel's module.
        axes: mesh axes by hand along which devices share rows.
        window: as in `attention`, less than a whole row.
        soft_cap: as there.
    """
    own = _xla if kernel is xla else kernel.attend
    whole = partial(own, window=window, soft_cap=soft_cap)
    match way:
        case ContextAttention.ring if window is not None:
            return partial(attend_in_window, whole, window, kernel.MULTIPLE, axes)
        case ContextAttention.ring:
            capped = {} if soft_cap is None else {"soft_cap": soft_cap}
            passes = kernel.forward, kernel.backward
            return partial(_ring, Kernel(*(partial(f, **capped) for f in passes)), axes)
        case ContextAttention.ulysses:
            return partial(_ulysses, whole, axes)
        case ContextAttention.all_gather:
            assert kernel is xla
            return partial(_all_gather, axes, window, soft_cap)
        case ContextAttention.auto:
            raise AssertionError("settled by train/execution")
        case _:
            assert_never(way)


def _ring(kernel: Kernel, axes: tuple[str, ...], q, k, v, ids, sinks) -> Array:
    operands = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    o_BNTH: Any = ring(kernel, axes, *operands, ids, sinks)
    return o_BNTH.swapaxes(1, 2)


def _ulysses(
    whole: Attend,
    axes: tuple[str, ...],
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int[Array, "B T"] | None,
    sinks_N: Float[Array, "N"] | None,
) -> Float[Array, "B T N H"]:
    def exchange(x: Array, split: int, joined: int) -> Array:
        return jax.lax.all_to_all(x, axes, split, joined, tiled=True)

    q, k, v = (exchange(x, 2, 1) for x in (q_BTNH, k_BTKH, v_BTKH))
    ids = None if segment_ids_BT is None else _of_all(segment_ids_BT, axes)
    if sinks_N is not None:  # of the own heads
        own, first = q.shape[2], q.shape[2] * jax.lax.axis_index(axes)
        sinks_N = jax.lax.dynamic_slice_in_dim(sinks_N, first, own)
    return exchange(whole(q, k, v, ids, sinks_N), 1, 2)


def _all_gather(
    axes: tuple[str, ...],
    window: int | None,
    soft_cap: float | None,
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int[Array, "B T"] | None,
    sinks_N: Float[Array, "N"] | None,
) -> Float[Array, "B T N H"]:
    T = q_BTNH.shape[1]
    k_BSKH, v_BSKH = _of_all(k_BTKH, axes), _of_all(v_BTKH, axes)
    own_T = T * jax.lax.axis_index(axes) + jnp.arange(T)
    behind_TS = own_T[:, None] - jnp.arange(k_BSKH.shape[1])[None]
    mask_BTS = (behind_TS >= 0)[None]
    if window is not None:
        mask_BTS &= (behind_TS < window)[None]
    if segment_ids_BT is not None:
        keys_BS = _of_all(segment_ids_BT, axes)
        mask_BTS &= segment_ids_BT[:, :, None] == keys_BS[:, None]
    more = q_BTNH.dtype, soft_cap, sinks_N
    return xla.attend(q_BTNH, k_BSKH, v_BSKH, mask_BTS, *more)


def _xla(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    sinks: Array | None,
    *,
    window: int | None,
    soft_cap: float | None,
) -> Array:
    mask = masks.causal(q.shape[1], segment_ids, window)
    return xla.attend(q, k, v, mask, q.dtype, soft_cap, sinks, causal=True)


def _of_all(x_BT: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.all_gather(x_BT, axes, axis=1, tiled=True)
