"""Taps: figures of what passes through the layers, for whoever watches a run.

A layer tells `how.taps` the results that are worth a look, by name. Where nobody
watches there are no taps, and the traced program is the one without them. What they
note has no gradient, and leaves a scan over layers as one of its results, so that a
watched forward pass is the same one. The figures are a device's own: to reduce them
over devices and microbatches is up to the caller.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.eight_bits.quantization import Scaled, largest_value

Named = dict[str, Float[Array, "*L"]]
Reduce = Callable[[jax.Array], jax.Array]


class Noted(NamedTuple):
    """Figures of a layer, or of L layers, by name.

    largest: float32, the largest absolute value; infinite if one is not finite.
    shares: float32, the part of all values of which something holds.
    """

    largest: Named
    shares: Named

    def reduced(self, largest: Reduce, share: Reduce) -> "Noted":
        """Apply a reduction to each figure, by its kind."""
        return Noted(
            {name: largest(values) for name, values in self.largest.items()},
            {name: share(values) for name, values in self.shares.items()},
        )


class Taps:
    """Collects the figures of one layer, or of stacks of layers, while it is traced."""

    def __init__(self) -> None:
        self._largest: Named = {}
        self._counts: dict[str, tuple[jax.Array, int]] = {}
        self._stacks: list[Noted] = []

    def note(self, name: str, x: Float[Array, "..."]) -> None:
        """Note how large a result of the layer is."""
        x = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
        # On the way between devices the maximum of NaN and a number may be either.
        self._largest[name] = jnp.max(jnp.where(jnp.isfinite(x), x, jnp.inf))

    def note_rounding(self, x: Float[Array, "..."], rounded: Scaled) -> None:
        """Note which part of an operand its eight bits flush to zero, or cut off."""
        values = rounded.values
        flushed = (values == 0) & (x != 0)
        saturated = jnp.abs(values.astype(jnp.float32)) == largest_value(values.dtype)
        for name, hits in {"flushed": flushed, "saturated": saturated}.items():
            before, size = self._counts.get(name, (jnp.float32(0), 0))
            count = before + jnp.sum(hits, dtype=jnp.float32)
            self._counts[name] = count, size + x.size

    def of_layer(self) -> Noted:
        """Return the figures of the layer, scalars."""
        shares = {name: count / size for name, (count, size) in self._counts.items()}
        return Noted(self._largest, shares)

    def put(self, stack: Noted) -> None:
        """Take over the figures [L] of a stack of layers; the next follows behind."""
        self._stacks.append(stack)

    def of_stacks(self) -> Noted:
        """Return the figures of all layers."""
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *self._stacks)
