"""The gated delta rule, over chunks of positions.

A value head has a state S [H, V], which maps keys to values. At each position the state
decays, and the value that it holds for the key moves towards the new value:

    S = e^g S;  S = S + k (b (v - S^T k))^T;  o = S^T q

Over a chunk of C positions, with the state S before it, the inclusive sum G of g, and
D_ij = e^(G_i - G_j) for i >= j, otherwise 0:

    X = (I + strict_lower(b_i (k_i . k_j) D_ij))^-1;  u = X (b v);  w = X (b e^G k)
    new = u - w S;  o = e^G q S + (q k^T * D) new
    S = e^(G_C) S + (e^(G_C - G) k)^T new

A scan over chunks carries S. Everything that does not depend on S is computed before
the scan, for all chunks at once. g, X, u, w and the state are float32; operands of
other products have the compute dtype. No factor e^.. spans the start of a document,
so that the state is forgotten there.

Source: arXiv:2412.06464, section 3.3.

Shapes: B batch, T time, M chunks, C positions of a chunk, K key heads, R value heads of
a key head, H key dim, V value dim.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from model.parts.delta.inverse import unit_lower_inverse
from model.products import product

_MAX_CHUNK = 64  # the largest C; a power of two
_FRACTIONS = 256  # Sums of multiples of 1/256 are exact up to 2^16.
_exact = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class DeltaInputs(NamedTuple):
    """The operands of the rule, in float32.

    queries: already scaled by H^-0.5.
    keys: of norm 1, so that the state cannot grow.
    decay: g, the logarithm of the factor by which the state decays.
    rate: b, between 0 and 1: how far the held value moves towards the new one.
    starts: where a document starts, so that the state before is forgotten.
    """

    queries: Float[Array, "B T K H"]
    keys: Float[Array, "B T K H"]
    values: Float[Array, "B T K R V"]
    decay: Float[Array, "B T K R"]
    rate: Float[Array, "B T K R"]
    starts: Bool[Array, "B T"]


State = Float[Array, "B K R H V"]


class AffineMap(NamedTuple):
    """The map of several positions: the state S becomes `factor` S + `offset`."""

    factor: Float[Array, "*dims H H"]
    offset: Float[Array, "*dims H V"]

    def __call__(self, state: Float[Array, "*dims H V"]) -> Float[Array, "*dims H V"]:
        """Return the state after these positions."""
        return _exact("bkrhi,bkriv->bkrhv", self.factor, state) + self.offset


class _Chunks(NamedTuple):
    """All that the scan reads: arrays [M, ...], or those of one chunk.

    What only products read is stored in the compute dtype, to which they round it.
    """

    queries: Float[Array, "*M B K C H"]
    keys: Float[Array, "*M B K C H"]
    scores: Float[Array, "*M B K R C C"]  # q k^T * D
    u: Float[Array, "*M B K R C V"]
    w: Float[Array, "*M B K R C H"]
    decay_before: Float[Array, "*M B K R C"]  # e^G
    decay_after: Float[Array, "*M B K R C"]  # e^(G_C - G)
    decay: Float[Array, "*M B K R"]  # e^(G_C)

    @property
    def unrounded(self) -> "_Chunks":
        """The arrays in float32, so that products return float32."""
        return jax.tree.map(lambda x: x.astype(jnp.float32), self)


def delta_rule(
    inputs: DeltaInputs,
    state_before: State | Callable[[AffineMap], State],
    compute: DTypeLike,
    chunks_at_once: int | None = None,
) -> tuple[Float[Array, "B T K R V"], State]:
    """Return the float32 output of T positions, and the state after them.

    Args:
        inputs: the operands.
        state_before: the float32 state before the first position. If other devices have
            earlier positions of the rows, it is a function of the map of the T
            positions.
        compute: the dtype of operands of products.
        chunks_at_once: the largest number of chunks whose arrays are in memory at once.
            The backward pass computes them again. None means all, which are kept.
    """
    B, T, K, R, V = inputs.values.shape
    groups = _split_into_groups(inputs, chunks_at_once)
    if callable(state_before):
        state_before = state_before(_map_of(groups, compute))

    def run_group(state: jax.Array, group: DeltaInputs):
        return jax.lax.scan(run_chunk, state, _prepare(group, compute))

    def run_chunk(state: jax.Array, chunk: _Chunks):
        chunk = chunk.unrounded
        o = product("bkch,bkrhv->bkrcv", chunk.queries, state, compute)
        state, new = _write(state, chunk, compute)
        new_o = product("bkrij,bkrjv->bkriv", chunk.scores, new, compute)
        return state, chunk.decay_before[..., None] * o + new_o

    if len(groups.starts) > 1:
        run_group = jax.checkpoint(run_group)
    state, o_GMBKRCV = jax.lax.scan(run_group, state_before, groups)
    o_MBKRCV = o_GMBKRCV.reshape(-1, *o_GMBKRCV.shape[2:])
    o = jnp.moveaxis(o_MBKRCV, (0, 4), (1, 2)).reshape(B, -1, K, R, V)
    return o[:, :T], state


def _write(
    state: jax.Array, chunk: _Chunks, compute: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Return the state after a chunk, and the new values that it writes."""
    new = chunk.u - product("bkrch,bkrhv->bkrcv", chunk.w, state, compute)
    late = chunk.decay_after[..., None] * new
    written = product("bkch,bkrcv->bkrhv", chunk.keys, late, compute)
    return chunk.decay[..., None, None] * state + written, new


def _map_of(groups: DeltaInputs, compute: DTypeLike) -> AffineMap:
    """Return the map of all groups, by running them on the state [I | 0]."""
    *_, H = groups.keys.shape
    _, _, B, K, R, _, V = groups.values.shape
    state = jnp.broadcast_to(jnp.eye(H, H + V), (B, K, R, H, H + V))

    def run_group(state: jax.Array, group: DeltaInputs):
        chunks = _prepare(group, compute)
        widened = chunks._replace(u=jnp.pad(chunks.u, [(0, 0)] * 5 + [(H, 0)]))
        return jax.lax.scan(run_chunk, state, widened)

    def run_chunk(state: jax.Array, chunk: _Chunks):
        return _write(state, chunk.unrounded, compute)[0], None

    if len(groups.starts) > 1:
        run_group = jax.checkpoint(run_group)
    state, _ = jax.lax.scan(run_group, state, groups)
    return AffineMap(state[..., :H], state[..., H:])


def _prepare(group: DeltaInputs, compute: DTypeLike) -> _Chunks:
    """Compute for M chunks what does not depend on the state."""
    q_MBKCH, k_MBKCH, v_MBKRCV, g_MBKRC, b_MBKRC, starts_MBC = group
    decays = _decays(g_MBKRC, starts_MBC)
    decay_before = decays[..., 1:, 0]
    D = decays[..., 1:, 1:]

    similarity = product("mbkih,mbkjh->mbkij", k_MBKCH, k_MBKCH, compute)
    L = b_MBKRC[..., None] * similarity[:, :, :, None] * D
    X = unit_lower_inverse(jnp.tril(L, -1))
    scores = product("mbkih,mbkjh->mbkij", q_MBKCH, k_MBKCH, compute)
    rate, decayed_rate = (x[..., None, :] for x in (b_MBKRC, b_MBKRC * decay_before))
    return _Chunks(
        queries=q_MBKCH.astype(compute),
        keys=k_MBKCH.astype(compute),
        scores=(scores[:, :, :, None] * D).astype(compute),
        u=_exact("mbkrij,mbkrjv->mbkriv", X * rate, v_MBKRCV),
        w=_exact("mbkrij,mbkjh->mbkrih", X * decayed_rate, k_MBKCH).astype(compute),
        decay_before=decay_before,
        decay_after=decays[..., -1, 1:],
        decay=decays[..., -1, 0],
    )


def _decays(g_MBKRC: jax.Array, starts_MBC: jax.Array) -> jax.Array:
    """Return the factor by which the state decays from position j to i of a chunk.

    The result is [M, B, K, R, C + 1, C + 1]. Position 0 is the one before the chunk.
    The factor is zero if a document starts in between, and for i < j.
    """
    documents = jnp.cumsum(starts_MBC, axis=-1, dtype=jnp.int32)
    documents = jnp.pad(documents, [(0, 0), (0, 0), (1, 0)])
    is_same = documents[..., :, None] == documents[..., None, :]
    visible = is_same & jnp.tri(documents.shape[-1], dtype=bool)[None, None]
    # The sums may be below -1,000, where float32 has too few digits for differences of
    # neighbours. Therefore exact multiples of 1/256 and the rest are summed apart. Only
    # sums inside documents give gradients of exactly zero to other documents.
    coarse = jax.lax.stop_gradient(jnp.round(g_MBKRC * _FRACTIONS) / _FRACTIONS)
    summed = visible[..., 1:].astype(jnp.float32)
    exponents = jnp.float32(0)
    for part in (coarse, g_MBKRC - coarse):
        G = _exact("mbij,mbkrj->mbkri", summed, part)
        exponents += G[..., :, None] - G[..., None, :]
    # Mask before `exp`: the exponents of later positions are positive and large.
    return jnp.exp(jnp.where(visible[:, :, None, None], exponents, -jnp.inf))


def _split_into_groups(inputs: DeltaInputs, chunks_at_once: int | None) -> DeltaInputs:
    """Return arrays [groups, M, ...] of the chunks of each array."""
    chunks = [_split(x, 1) for x in inputs[:3]] + [_split(x, 0) for x in inputs[3:]]
    num_chunks = len(chunks[0])
    limit = min(chunks_at_once or num_chunks, num_chunks)
    M = next(m for m in range(limit, 0, -1) if num_chunks % m == 0)
    return DeltaInputs._make(x.reshape(-1, M, *x.shape[1:]) for x in chunks)


def _split(x: jax.Array, num_feature_dims: int) -> jax.Array:
    """Return [M, B, *heads, C, *features] of [B, T, *heads, *features], padded."""
    B, T, *dims = x.shape
    C = min(_MAX_CHUNK, 1 << (T - 1).bit_length())  # The inverse needs a power of two.
    x = jnp.pad(x, [(0, 0), (0, -T % C), *[(0, 0)] * len(dims)])
    chunks = x.reshape(B, -1, C, *dims)
    return jnp.moveaxis(chunks, (1, 2), (0, x.ndim - num_feature_dims))
