"""Attention in a window, for rows that devices share in the order of a ring.

A device has two chunks of each row (`ring.py`). Its queries see their own
chunk and earlier keys, most of which are on other devices. If the window is at most a
chunk long, a query sees its own chunk and the end of the previous chunk. Two permutes
of each array send the ends of chunks to the devices that need them. For a longer
window, each device gathers the keys and values of all devices, and selects those before
its chunks. All devices do the same amount of work. As in all inputs of kernels
(`Inputs`), the queries are the last of the keys' positions.

Shapes: B batch, T local positions, C = T/2 positions of a chunk, F positions fetched
for a chunk, N query heads, K key/value heads, H head dim,
V value dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from model.attention.inputs import Attended, Inputs


def attend_in_window(
    attend: Callable[..., Attended],
    window: int,
    multiple: int,
    axes: tuple[str, ...],
    inputs: Inputs,
) -> Attended:
    """Attend from a device's two chunks to the keys in the window.

    `attend` is the kernel. It needs numbers of positions that are divisible by
    `multiple`, which divides the length of a chunk. The window is shorter than a row.
    Devices share rows over the manual mesh axes `axes`. Segment ids are at least 0.
    """
    q_BTNH, k_BTKH, v_BTKV, segment_ids_BT, sinks_N = inputs
    B, T = q_BTNH.shape[:2]
    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros((B, T), jnp.int32)
    size = _fetch_size(window - 1, T // 2, multiple)
    fetch = _fetch_from_neighbours if size <= T // 2 else _fetch_from_all

    def with_earlier_keys(x_BT: Array) -> Array:
        chunks = x_BT.reshape(B, 2, T // 2, *x_BT.shape[2:])
        keys = jnp.concatenate([fetch(chunks, size, axes), chunks], axis=2)
        return keys.reshape(2 * B, *keys.shape[2:])

    # Positions before the start of a row get segment id 0. Adding 1 to the ids of
    # documents separates them from these positions.
    attended = attend(
        Inputs(
            q_BTNH.reshape(2 * B, T // 2, *q_BTNH.shape[2:]),
            with_earlier_keys(k_BTKH),
            with_earlier_keys(v_BTKV),
            with_earlier_keys(segment_ids_BT + 1),
            sinks_N,
        )
    )
    return attended._replace(o_BTNV=attended.o_BTNV.reshape(*q_BTNH.shape[:3], -1))


def _fetch_size(num_keys: int, chunk: int, multiple: int) -> int:
    """Return how many keys before a chunk to fetch: a divisor or multiple of the chunk.

    Such a number allows large blocks, because a kernel's block must divide both sizes.
    """
    if num_keys > chunk:
        return -(-num_keys // chunk) * chunk
    sizes = (n for n in range(multiple, chunk + 1, multiple) if chunk % n == 0)
    return next(n for n in sizes if n >= num_keys)


def _fetch_from_neighbours(
    chunks: Shaped[Array, "B 2 C *rest"], size: int, axes: tuple[str, ...]
) -> Shaped[Array, "B 2 F *rest"]:
    """Fetch the end of the chunk before each of this device's chunks.

    Device i of c has chunks i and 2c-1-i. Chunk i-1, before the first of these, is the
    first chunk of device i-1. Chunk 2c-2-i, before the second of these, is the second
    chunk of device i+1, or the device's own first chunk if it is the last device.
    """
    c = jax.lax.psum(1, axes)
    i = jax.lax.axis_index(axes)
    ends = chunks[:, :, chunks.shape[2] - size :]
    to_next = [(j, (j + 1) % c) for j in range(c)]
    to_previous = [(k, j) for j, k in to_next]
    before_first = jax.lax.ppermute(ends[:, 0], axes, to_next)
    before_first = jnp.where(i == 0, 0, before_first)
    before_second = jax.lax.ppermute(ends[:, 1], axes, to_previous)
    before_second = jnp.where(i == c - 1, ends[:, 0], before_second)
    return jnp.stack([before_first, before_second], axis=1)


def _fetch_from_all(
    chunks: Shaped[Array, "B 2 C *rest"], size: int, axes: tuple[str, ...]
) -> Shaped[Array, "B 2 F *rest"]:
    """Gather whole rows and return the positions before each local chunk."""
    B, _, C = chunks.shape[:3]
    c = jax.lax.psum(1, axes)
    i = jax.lax.axis_index(axes)
    gathered = jax.lax.all_gather(chunks[None], axes, tiled=True)  # [c, B, 2, C, ...]
    ordered = jnp.concatenate([gathered[:, :, 0], gathered[::-1, :, 1]])
    rows = jnp.moveaxis(ordered, 0, 1).reshape(B, 2 * c * C, *chunks.shape[3:])
    rows = jnp.pad(rows, ((0, 0), (size, 0), *[(0, 0)] * (chunks.ndim - 3)))
    earlier = [
        jax.lax.dynamic_slice_in_dim(rows, chunk * C, size, axis=1)
        for chunk in (i, 2 * c - 1 - i)
    ]
    return jnp.stack(earlier, axis=1)
