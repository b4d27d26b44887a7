"""Attention over rows that devices share: each device holds T of S positions.

- `ring` sends keys and values from device to device (`ring.py`). Layers with a window
  send only the keys in the window (`window.py`).
- `ulysses` exchanges positions for heads by all-to-alls. Each device then attends over
  whole rows for some of the heads.
- `all_gather` gathers all keys and values on each device, and reduce-scatters their
  gradients. This sends less than a ring, but needs memory for whole rows. The mask then
  depends on the device, which only `xla` and `splash` support. With `splash`, devices
  have the chunks of a ring, so that all of them have the same amount of work.

Source: DeepSpeed Ulysses, arXiv:2309.14509; `all_gather`: Llama 3, arXiv:2407.21783,
section 3.3.2.

Shapes: B batch, T local positions, S positions of a row, N query heads,
K key/value heads, H head dim, V value dim.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from jaxtyping import Array

from data.errors import Mistake
from model.attention import xla
from model.attention.inputs import Attended, Inputs, score_bound
from model.choices import Attention, ContextAttention
from model.gather import AxisSteps
from model.parts.context.ring import ring
from model.parts.context.ring_kernel import Kernel, Travelling
from model.parts.context.window import attend_in_window
from model.parts.kernels import cudnn, cudnn_packed, splash

Attend = Callable[[Inputs], Attended]
# `auto` does not gather more bytes of keys, values and their gradients.
_MAX_GATHERED_BYTES = 2**31
KERNELS = {
    Attention.xla: xla,
    Attention.cudnn: cudnn,
    Attention.cudnn_packed: cudnn_packed,
    Attention.splash: splash,
}


def choose_context_attention(
    setting: ContextAttention,
    kernel: Attention,
    devices: int,
    sequence_length: int,
    kv_heads: int,
    kv_bytes: int | None = None,
) -> ContextAttention | Mistake:
    """Return the algorithm for shared rows; `auto` selects the first that can run.

    The result is a mistake if the algorithm cannot run; with `auto`, if none can.
    With splash, `auto` gathers if a device has the memory, because this sends least.

    Args:
        setting: the algorithm, or `auto`.
        kernel: the kernel of attention.
        devices: the number of devices that share a row.
        sequence_length: the positions of a row.
        kv_heads: the key and value heads of one device.
        kv_bytes: the bytes of the keys and values of a device's whole rows; None if
            every layer would save them.
    """

    def reason_against(algorithm: ContextAttention) -> str | None:
        multiple = devices
        match algorithm:
            case ContextAttention.ulysses if kv_heads % devices:
                return (
                    f"ulysses needs the {kv_heads} key and value heads of a device to "
                    f"be divisible by mesh.context={devices}"
                )
            case ContextAttention.ring if kernel is Attention.cudnn_packed:
                return (
                    "ring needs model.attention=cudnn: cudnn_packed attends to whole "
                    "rows only"
                )
            case ContextAttention.ring:
                multiple = 2 * devices * KERNELS[kernel].LENGTH_MULTIPLE
            case ContextAttention.all_gather if kernel is Attention.splash:
                multiple = 2 * devices * splash.LENGTH_MULTIPLE
            case ContextAttention.all_gather if kernel is not Attention.xla:
                return f"all_gather needs model.attention=xla or splash, not {kernel}"
        if sequence_length % multiple:
            return (
                f"{algorithm} over {devices} devices with {kernel} attention needs a "
                f"data.sequence_length divisible by {multiple}, not {sequence_length}"
            )
        return None

    algorithms = [setting]
    if setting is ContextAttention.auto:
        algorithms = [a for a in ContextAttention if a is not ContextAttention.auto]
        # Gradients take as many bytes again.
        fits = kv_bytes is not None and 2 * kv_bytes <= _MAX_GATHERED_BYTES
        if kernel is Attention.splash and fits:
            algorithms.insert(0, ContextAttention.all_gather)
    reasons = {algorithm: reason_against(algorithm) for algorithm in algorithms}
    for algorithm, reason in reasons.items():
        if reason is None:
            return algorithm
    text = "; ".join(map(str, reasons.values()))
    rule = f"is not possible: {text}; change one of them"
    return Mistake("mesh.context_attention", setting, rule)


def make_context_parallel_attention(
    algorithm: ContextAttention,
    kernel: ModuleType,
    axes: tuple[str, ...],
    *,
    window: int | None,
    soft_cap: float | None,
    in_ring_order: bool = False,
    axis_steps: tuple[AxisSteps, ...] = (),
) -> Attend:
    """Return the attention function for local rows, heads and positions.

    Devices share rows over the manual mesh axes `axes`, along which collectives take
    `axis_steps`. `in_ring_order` says whether they have the chunks of a ring. The
    algorithm is not `auto`, and the window is shorter than a row.
    """
    attend_rows = partial(kernel.attend, window=window, soft_cap=soft_cap)
    if window is not None and in_ring_order:
        multiple = kernel.LENGTH_MULTIPLE
        return partial(attend_in_window, attend_rows, window, multiple, axes)
    match algorithm:
        case ContextAttention.ring:
            options = {} if soft_cap is None else {"soft_cap": soft_cap}
            ring_kernel = Kernel(
                forward=partial(kernel.forward, **options),
                backward=partial(kernel.backward, **options),
            )
            return partial(_attend_in_ring, ring_kernel, kernel.SCALES_QUERIES, axes)
        case ContextAttention.ulysses:
            return partial(_exchange_and_attend, attend_rows, axes)
        case ContextAttention.all_gather if in_ring_order:
            return partial(
                kernel.attend_gathered,
                axes=axes,
                axis_steps=axis_steps,
                soft_cap=soft_cap,
            )
        case ContextAttention.all_gather:
            return partial(_gather_and_attend, axes, window, soft_cap)
        case ContextAttention.auto:
            raise AssertionError("train/resolve/execution.py replaces `auto`")
        case _:
            assert_never(algorithm)


def _attend_in_ring(
    kernel: Kernel, scales_queries: bool, axes: tuple[str, ...], inputs: Inputs
) -> Attended:
    q, k, v, ids, sinks = inputs
    scaled_q = q * q.shape[-1] ** -0.5 if scales_queries else q
    q_BNTH, k_BKTH, v_BKTV = (x.swapaxes(1, 2) for x in (scaled_q, k, v))
    local = Travelling((k_BKTH, v_BKTV), ids)
    result: Any = ring(kernel, axes, q_BNTH, local, sinks)
    return Attended(result.o_BNTV.swapaxes(1, 2), score_bound(result.lse_BNT))


def _exchange_and_attend(
    attend_rows: Attend, axes: tuple[str, ...], inputs: Inputs
) -> Attended:
    def exchange(x: Array, split_dim: int, joined_dim: int) -> Array:
        return jax.lax.all_to_all(x, axes, split_dim, joined_dim, tiled=True)

    q, k, v = (exchange(x, 2, 1) for x in inputs[:3])
    ids = inputs.segment_ids_BS
    sinks_N = inputs.sinks_N
    if ids is not None:
        ids = _gather_positions(ids, axes)
    num_heads = q.shape[2]
    first_head = num_heads * jax.lax.axis_index(axes)
    if sinks_N is not None:
        sinks_N = jax.lax.dynamic_slice_in_dim(sinks_N, first_head, num_heads)
    o, bound = attend_rows(Inputs(q, k, v, ids, sinks_N))
    # The heads of other devices have no local queries, so that nothing bounds them.
    no_bound_N = jnp.full(inputs.q_BTNH.shape[2], -jnp.inf)
    bound_N = jax.lax.dynamic_update_slice_in_dim(no_bound_N, bound, first_head, 0)
    return Attended(exchange(o, 1, 2), bound_N)


def _gather_and_attend(
    axes: tuple[str, ...], window: int | None, soft_cap: float | None, inputs: Inputs
) -> Attended:
    q_BTNH, k_BTKH, v_BTKV, segment_ids_BT, _ = inputs
    T = q_BTNH.shape[1]
    k_BSKH = k_BTKH
    v_BSKV = v_BTKV
    if k_BTKH.shape[1] == T:  # Otherwise they are already gathered.
        k_BSKH, v_BSKV = (_gather_positions(x, axes) for x in (k_BTKH, v_BTKV))
    positions_T = T * jax.lax.axis_index(axes) + jnp.arange(T)
    distance_TS = positions_T[:, None] - jnp.arange(k_BSKH.shape[1])[None]
    mask_BTS = (distance_TS >= 0)[None]
    if window is not None:
        mask_BTS &= (distance_TS < window)[None]
    if segment_ids_BT is not None:
        key_ids_BS = _gather_positions(segment_ids_BT, axes)
        mask_BTS &= segment_ids_BT[:, :, None] == key_ids_BS[:, None]
    gathered = inputs._replace(k_BSKH=k_BSKH, v_BSKV=v_BSKV)
    return xla.attend_masked(gathered, mask_BTS, q_BTNH.dtype, soft_cap=soft_cap)


def _gather_positions(x_BT: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.all_gather(x_BT, axes, axis=1, tiled=True)
