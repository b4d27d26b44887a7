"""Taps record figures of the layers' intermediate results, for watched steps.

A layer passes results by name to `call.taps`. If a step is not watched there are no
taps, and the traced program does not contain them. Recorded figures have no gradient,
and a scan over layers returns them: watching a step does not change its values. The
figures are local to a device: the caller reduces them over devices and microbatches.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from model.eight_bits.quantization import Quantized, largest_value

ValuesByName = dict[str, Float[Array, "*L"]]
Reduce = Callable[[jax.Array], jax.Array]


class LayerFigures(NamedTuple):
    """The float32 figures of a layer, or of L layers, by name; `Taps` collects them.

    largest: the largest absolute value; infinite if a value is not finite.
    shares: the fraction of values with a property.
    """

    largest: ValuesByName
    shares: ValuesByName

    def reduce(self, reduce_largest: Reduce, reduce_share: Reduce) -> "LayerFigures":
        """Apply a reduction to each figure, by its kind."""
        return LayerFigures(
            {name: reduce_largest(values) for name, values in self.largest.items()},
            {name: reduce_share(values) for name, values in self.shares.items()},
        )


def count_rounding(
    x: Float[Array, "..."], rounded: Quantized, used: Bool[Array, "..."] | None = None
) -> Float[Array, "3"]:
    """Return three counts of an operand's values: flushed to zero, saturated, and all.

    `used` says whether each value takes part in a product. None means that all do.
    """
    x, values = jax.lax.stop_gradient((x, rounded.values))
    flushed = (values == 0) & (x != 0)
    saturated = jnp.abs(values.astype(jnp.float32)) == largest_value(values.dtype)
    used = jnp.ones(x.shape, bool) if used is None else used
    masks = flushed & used, saturated & used, jnp.broadcast_to(used, x.shape)
    return jnp.stack([jnp.sum(mask, dtype=jnp.float32) for mask in masks])


class Taps:
    """Collects figures during tracing: of one layer in a scan, or of whole stacks.

    In a layer, results are noted, and `layer_figures` returns their figures. The scan
    stacks these, `add_stack` takes them, and `all_figures` joins the stacks.
    """

    def __init__(self, exact: bool = False) -> None:
        """Start empty. An `exact` layer quantizes nothing, but other layers do."""
        self._largest: ValuesByName = {}
        self._counts = jnp.array([0.0, 0.0, 1.0]) if exact else None
        self._stacks: list[LayerFigures] = []

    def note(self, name: str, x: Float[Array, "..."]) -> None:
        """Record the largest absolute value of a result of the layer."""
        x = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
        # An all-reduce maximum of NaN and a number may be the NaN or the number.
        self._largest[name] = jnp.max(jnp.where(jnp.isfinite(x), x, jnp.inf))

    def note_rounding(self, counts: Float[Array, "3"]) -> None:
        """Add the counts of an operand's rounding, from `count_rounding`."""
        self._counts = counts if self._counts is None else self._counts + counts

    def layer_figures(self) -> LayerFigures:
        """Return the figures of the layer as scalars."""
        if self._counts is None:
            return LayerFigures(self._largest, {})
        flushed, saturated, size = self._counts
        shares = {"flushed": flushed / size, "saturated": saturated / size}
        return LayerFigures(self._largest, shares)

    def add_stack(self, stack: LayerFigures) -> None:
        """Append the figures [L] of a stack of layers."""
        self._stacks.append(stack)

    def all_figures(self) -> LayerFigures:
        """Return the figures of all layers, concatenated over stacks."""
        return jax.tree.map(lambda *stacks: jnp.concatenate(stacks), *self._stacks)
