"""A window over rows that devices share, in a ring's order (model/attention/ring.py).

Each of a device's two chunks of queries sees itself and keys before it, which other
devices hold. A window of at most a chunk reaches into the chunk before alone: what ends
with it travels to the device that needs it, two permutes an array. For a longer one the
keys and values of all devices are gathered, and each takes what lies before its chunks.
Every device does as much as the others, and a kernel sees rows that it knows already:
queries that are the last of some positions.

Shapes: B batch, T positions of a device, C = T/2 of a chunk, N query heads, K key/value
heads, H head dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


def attend_in_window(
    whole: Callable[..., Array],
    window: int,
    multiple: int,
    axes: tuple[str, ...],
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segment_ids_BT: Int[Array, "B T"] | None,
    sinks_N: Float[Array, "N"] | None,
) -> Float[Array, "B T N H"]:
    """Attend from a device's two chunks to the keys of a window.

    Args:
        whole: (q, k, v, documents, sinks) -> o, attention in the window from the last
            of some positions to all of them.
        window: how many keys a query sees at most, itself included; less than a row.
        multiple: of which a kernel's positions must be one, as a chunk's are.
        axes: mesh axes by hand along which devices share rows.
        q_BTNH: queries.
        k_BTKH: keys.
        v_BTKH: values.
        segment_ids_BT: int32 document of each position, not negative; None: one a row.
        sinks_N: as in `attention`.
    """
    B, T = q_BTNH.shape[:2]
    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros((B, T), jnp.int32)
    reach = _reach(window - 1, T // 2, multiple)

    def with_keys_before(x_BT: Array) -> Array:
        chunks = x_BT.reshape(B, 2, T // 2, *x_BT.shape[2:])
        bring = _of_neighbours if reach <= T // 2 else _of_all
        keys = jnp.concatenate([bring(chunks, reach, axes), chunks], axis=2)
        return keys.reshape(2 * B, *keys.shape[2:])

    # Before a row's first position there are zeros: no document is called 0 here.
    arrays = k_BTKH, v_BTKH, segment_ids_BT + 1
    q = q_BTNH.reshape(2 * B, T // 2, *q_BTNH.shape[2:])
    return whole(q, *map(with_keys_before, arrays), sinks_N).reshape(q_BTNH.shape)


def _reach(least: int, chunk: int, multiple: int) -> int:
    """Return how many keys before a chunk to bring: a part of it, or some of it whole.

    So what divides a chunk divides both: a kernel's blocks stay wide.
    """
    if least > chunk:
        return -(-least // chunk) * chunk
    parts = (n for n in range(multiple, chunk + 1, multiple) if chunk % n == 0)
    return next(n for n in parts if n >= least)


def _of_neighbours(
    chunks: Shaped[Array, "B 2 C *rest"], reach: int, axes: tuple[str, ...]
) -> Shaped[Array, "B 2 reach *rest"]:
    """Bring what ends each chunk's predecessor.

    Device i holds chunks i and 2c-1-i: before them come the first of device i-1 and the
    second of device i+1; before the last device's second its own first.
    """
    c, i = jax.lax.psum(1, axes), jax.lax.axis_index(axes)
    ends = chunks[:, :, chunks.shape[2] - reach :]
    to_next = [(j, (j + 1) % c) for j in range(c)]
    to_previous = [(k, j) for j, k in to_next]
    before_first = jax.lax.ppermute(ends[:, 0], axes, to_next)
    before_first = jnp.where(i == 0, 0, before_first)
    before_second = jax.lax.ppermute(ends[:, 1], axes, to_previous)
    before_second = jnp.where(i == c - 1, ends[:, 0], before_second)
    return jnp.stack([before_first, before_second], axis=1)


def _of_all(
    chunks: Shaped[Array, "B 2 C *rest"], reach: int, axes: tuple[str, ...]
) -> Shaped[Array, "B 2 reach *rest"]:
    """Bring what lies before each chunk, out of the whole rows."""
    (B, _, C), rest = chunks.shape[:3], chunks.shape[3:]
    c, i = jax.lax.psum(1, axes), jax.lax.axis_index(axes)
    of_devices = jax.lax.all_gather(chunks[None], axes, tiled=True)  # [c, B, 2, C, ...]
    ordered = jnp.concatenate([of_devices[:, :, 0], of_devices[::-1, :, 1]])
    row = jnp.moveaxis(ordered, 0, 1).reshape(B, 2 * c * C, *rest)
    row = jnp.pad(row, ((0, 0), (reach, 0), *[(0, 0)] * len(rest)))
    parts = [
        jax.lax.dynamic_slice_in_dim(row, chunk * C, reach, axis=1)
        for chunk in (i, 2 * c - 1 - i)
    ]
    return jnp.stack(parts, axis=1)
