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
from jaxtyping import Array, Bool, Float

from model.eight_bits.quantization import Quantized, largest_value

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


def count_rounding(
    x: Float[Array, "..."], rounded: Quantized, used: Bool[Array, "..."] | None = None
) -> Float[Array, "3"]:
    """Count the values of an operand that eight bits flush to zero, or cut off; all.

    Args:
        x: the operand.
        rounded: the same in eight bits.
        used: of each value, whether something multiplies it; None: all are.
    """
    x, values = jax.lax.stop_gradient((x, rounded.values))
    flushed = (values == 0) & (x != 0)
    saturated = jnp.abs(values.astype(jnp.float32)) == largest_value(values.dtype)
    used = jnp.ones(x.shape, bool) if used is None else used
    hits = flushed & used, saturated & used, jnp.broadcast_to(used, x.shape)
    return jnp.stack([jnp.sum(each, dtype=jnp.float32) for each in hits])


class Taps:
    """Collects the figures of one layer, or of stacks of layers, while it is traced."""

    def __init__(self, exact: bool = False) -> None:
        """Start; a layer may be exact among others whose operands are rounded."""
        self._largest: Named = {}
        self._rounded = jnp.array([0.0, 0.0, 1.0]) if exact else None
        self._stacks: list[Noted] = []

    def note(self, name: str, x: Float[Array, "..."]) -> None:
        """Note how large a result of the layer is."""
        x = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
        # On the way between devices the maximum of NaN and a number may be either.
        self._largest[name] = jnp.max(jnp.where(jnp.isfinite(x), x, jnp.inf))

    def note_rounding(self, counts: Float[Array, "3"]) -> None:
        """Note what the eight bits of an operand lose, as `count_rounding` has it."""
        self._rounded = counts if self._rounded is None else self._rounded + counts

    def of_layer(self) -> Noted:
        """Return the figures of the layer, scalars."""
        if self._rounded is None:
            return Noted(self._largest, {})
        flushed, saturated, size = self._rounded
        shares = {"flushed": flushed / size, "saturated": saturated / size}
        return Noted(self._largest, shares)

    def put(self, stack: Noted) -> None:
        """Take over the figures [L] of a stack of layers; the next follows behind."""
        self._stacks.append(stack)

    def of_stacks(self) -> Noted:
        """Return the figures of all layers."""
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *self._stacks)
