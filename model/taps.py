"""Taps record statistics of the layers' intermediate results, for watched steps.

A layer passes results by name to `call.taps`. A step that is not watched has no taps,
and its program does not compute the statistics. Statistics have no gradient, and a scan
over layers returns them, so watching a step does not change its other results. The
statistics are local to a device: the caller reduces them over devices and microbatches.
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
    """The float32 statistics of a layer, or of L layers, by name.

    largest: the largest absolute value of a result; infinite if a value is not finite.
    shares: the fractions of rounded values that were flushed to zero or saturated.
    """

    largest: ValuesByName
    shares: ValuesByName

    def reduce(self, reduce_largest: Reduce, reduce_share: Reduce) -> "LayerFigures":
        """Apply `reduce_largest` to `largest`, and `reduce_share` to `shares`."""
        return LayerFigures(
            {name: reduce_largest(values) for name, values in self.largest.items()},
            {name: reduce_share(values) for name, values in self.shares.items()},
        )


def count_rounding(
    x: Float[Array, "..."], rounded: Quantized, used: Bool[Array, "..."] | None = None
) -> Float[Array, "3"]:
    """Return three counts of an operand's values: flushed to zero, saturated, and all.

    `used` says whether a product uses each value. None means that all are used.
    """
    x, values = jax.lax.stop_gradient((x, rounded.values))
    flushed = (values == 0) & (x != 0)
    saturated = jnp.abs(values.astype(jnp.float32)) == largest_value(values.dtype)
    used = jnp.ones(x.shape, bool) if used is None else used
    masks = flushed & used, saturated & used, jnp.broadcast_to(used, x.shape)
    return jnp.stack([jnp.sum(mask, dtype=jnp.float32) for mask in masks])


class Taps:
    """Collects statistics during tracing, of one layer in a scan or of whole segments.

    In a layer, `note` records a result, and `layer_figures` returns the statistics. The
    scan stacks them over layers. Outside of the scan, `add_segment` appends the
    statistics of each segment, and `all_figures` concatenates them.
    """

    def __init__(self, exact: bool = False) -> None:
        """Start empty. An `exact` layer does not quantize, so its shares are zero."""
        self._largest: ValuesByName = {}
        self._counts = jnp.array([0.0, 0.0, 1.0]) if exact else None
        self._segments: list[LayerFigures] = []

    def note(self, name: str, x: Float[Array, "..."]) -> None:
        """Record the largest absolute value of a result of the layer."""
        x = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
        # Replace NaN: an all-reduce maximum of NaN and a number may be either of them.
        self._largest[name] = jnp.max(jnp.where(jnp.isfinite(x), x, jnp.inf))

    def note_rounding(self, counts: Float[Array, "3"]) -> None:
        """Add the counts of an operand's rounding, from `count_rounding`."""
        self._counts = counts if self._counts is None else self._counts + counts

    def layer_figures(self) -> LayerFigures:
        """Return the statistics of the layer as scalars."""
        if self._counts is None:
            return LayerFigures(self._largest, {})
        flushed, saturated, size = self._counts
        shares = {"flushed": flushed / size, "saturated": saturated / size}
        return LayerFigures(self._largest, shares)

    def add_segment(self, segment: LayerFigures) -> None:
        """Append the statistics [L] of the layers of a segment."""
        self._segments.append(segment)

    def all_figures(self) -> LayerFigures:
        """Return the statistics of all layers, concatenated over segments."""
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *self._segments)
