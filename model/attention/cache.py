"""Caches of the earlier positions of a layer, and attention to keys and values.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
V value dim, C shifted channels, L layers.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.attention import masks, xla
from model.attention.inputs import Inputs
from model.attention.method import AttentionOptions


@runtime_checkable
class MixerCache(Protocol):
    """A NamedTuple of arrays [*L, B, ...]: what a mixer keeps of earlier positions."""

    @property
    def length(self) -> Int[Array, "*L"]:
        """The number of filled positions."""
        ...

    @property
    def first_B(self) -> Int[Array, "*L B"] | None:
        """The first position of each row; None if all begin at 0."""
        ...

    @property
    def has_positions(self) -> bool:
        """Whether arrays are [*L, B, S, ...], so that devices can divide positions."""
        ...


class KeysValues(NamedTuple):
    """The keys and values of the first `length` positions, in arrays of S positions.

    Row b begins at position first_B[b], or at 0 if first_B is None.
    """

    keys: Float[Array, "*L B S K H"]
    values: Float[Array, "*L B S K V"]
    length: Int[Array, "*L"]
    first_B: Int[Array, "*L B"] | None = None
    has_positions = True

    def append(
        self, k_BTKH: Float[Array, "B T K H"], v_BTKV: Float[Array, "B T K V"]
    ) -> "KeysValues":
        """Return the cache with T more positions after the filled positions."""
        write = jax.lax.dynamic_update_slice_in_dim
        return KeysValues(
            write(self.keys, k_BTKH, self.length, axis=1),
            write(self.values, v_BTKV, self.length, axis=1),
            self.length + k_BTKH.shape[1],
            self.first_B,
        )


class LayerCache(NamedTuple):
    """The cache of a layer: that of its mixer, and those of its token shifts.

    attention_input: the first C channels of the last position's input to attention.
        None without a shift (model/parts/token_shift.py).
    mlp_input: those of the input to the MLP.
    """

    mixer: MixerCache
    attention_input: Float[Array, "*L B C"] | None = None
    mlp_input: Float[Array, "*L B C"] | None = None

    @property
    def length(self) -> Int[Array, "*L"]:
        """The number of filled positions."""
        return self.mixer.length

    @property
    def first_B(self) -> Int[Array, "*L B"] | None:
        """The first position of each row, or None if all rows begin at 0."""
        return self.mixer.first_B


def cached_attention(
    q_BTNH: Float[Array, "B T N H"],
    cache: KeysValues,
    options: AttentionOptions,
    trained_length: int | None = None,
    sinks_N: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N V"]:
    """Attend causally from the newest T positions of a cache.

    The cache already includes the keys and values of these T positions. A query sees at
    most `trained_length` keys, which is the length of rows in training.
    No dropout is applied. `Inputs` explains the sinks.
    """
    T = q_BTNH.shape[1]
    S = cache.keys.shape[1]
    positions_T = cache.length - T + jnp.arange(T)
    distance_TS = positions_T[:, None] - jnp.arange(S)[None]
    visible_TS = distance_TS >= 0
    for num_keys in (
        trained_length,
        masks.layer_window(options.window, options.local_flag, S),
    ):
        if num_keys is not None:
            visible_TS &= distance_TS < num_keys
    visible_BTS = visible_TS[None]
    if cache.first_B is not None:
        visible_BTS &= jnp.arange(S)[None, None] >= cache.first_B[:, None, None]
    inputs = Inputs(q_BTNH, cache.keys, cache.values, sinks_N=sinks_N)
    return xla.attend_masked(
        inputs, visible_BTS, options.compute, soft_cap=options.soft_cap
    ).o_BTNV
