"""The cache of latent attention.

Shapes: B batch, T new positions, S positions, C latent dim, L layers.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from model.attention.cache import KeysValues


class Latents(NamedTuple):
    """The latents of the first `length` positions, in an array of S positions.

    A latent has the normalised values from which keys and values are expanded, and then
    the rotated part of all keys (attention.py). `first_B` is explained in `MixerCache`.
    """

    latents: Float[Array, "*L B S C"]
    length: Int[Array, "*L"]
    first_B: Int[Array, "*L B"] | None = None
    has_positions = True

    def append(self, x_BTC: Float[Array, "B T C"]) -> "Latents":
        """Return the cache with T more positions after the filled positions."""
        write = jax.lax.dynamic_update_slice_in_dim
        latents = write(self.latents, x_BTC, self.length, axis=1)
        return self._replace(latents=latents, length=self.length + x_BTC.shape[1])

    def as_keys_values(self, value_dim: int) -> KeysValues:
        """Return the latents as keys, and their first dims as values, of one head."""
        k_BS1C = self.latents[:, :, None]
        return KeysValues(k_BS1C, k_BS1C[..., :value_dim], self.length, self.first_B)
