"""Taps record statistics of the layers' intermediate results.

A layer passes results by name to `call.taps`. They record the statistics of a watched
step, the bounds of scores for QK-clip (train/optimizers/qk_clip.py), or both. A step
without taps does not compute them. Statistics have no gradient, and a scan over layers
returns them, so watching a step does not change its other results. The statistics are
local to a device: the caller reduces them over devices and microbatches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from model.products import Quantized, largest_value

ValuesByName = dict[str, Float[Array, "*L"]]
Reduce = Callable[[jax.Array], jax.Array]


class LayerFigures(NamedTuple):
    """The float32 statistics of a layer, or of L layers, by name.

    largest: the largest absolute value of a result; infinite if a value is not finite.
    shares: the fractions of rounded values that were flushed to zero or saturated.
    bounds: the bound of each head's scores (`Attended`), at least 0, and 0 in layers
        without attention. None if bounds are not recorded.
    """

    largest: ValuesByName
    shares: ValuesByName
    bounds: Float[Array, "*L N"] | None = None

    def reduce(self, reduce_largest: Reduce, reduce_share: Reduce) -> "LayerFigures":
        """Apply `reduce_largest` to maxima, and `reduce_share` to `shares`."""
        return LayerFigures(
            jax.tree.map(reduce_largest, self.largest),
            jax.tree.map(reduce_share, self.shares),
            jax.tree.map(reduce_largest, self.bounds),
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

    def __init__(
        self, watched: bool = True, num_heads: int | None = None, exact: bool = False
    ) -> None:
        """Start empty. An `exact` layer does not quantize, so its shares are zero.

        With `watched`, they record the statistics of a watched step. With `num_heads`,
        they record the bounds of the scores of this number of heads.
        """
        self.watched = watched
        self._num_heads = num_heads
        self._largest: ValuesByName = {}
        self._counts = jnp.array([0.0, 0.0, 1.0]) if exact and watched else None
        # A layer without attention notes no scores.
        self._bounds: Any = num_heads and np.zeros(num_heads, np.float32)
        self._segments: list[LayerFigures] = []

    def empty(self, exact: bool = False) -> "Taps":
        """Return empty taps that record the same figures."""
        return type(self)(self.watched, self._num_heads, exact)

    def note(self, name: str, x: Float[Array, "..."]) -> None:
        """Record the largest absolute value of a result of the layer."""
        if self.watched:
            x = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
            self._largest[name] = jnp.max(_without_nan(x))

    def note_scores(self, bound_N: Float[Array, "N"]) -> None:
        """Record the bound of each head's scores."""
        if self._num_heads is not None:
            self._bounds = jnp.maximum(0.0, _without_nan(bound_N))

    def note_rounding(self, counts: Float[Array, "3"]) -> None:
        """Add the counts of an operand's rounding, from `count_rounding`."""
        self._counts = counts if self._counts is None else self._counts + counts

    def layer_figures(self) -> LayerFigures:
        """Return the statistics of the layer as scalars."""
        if self._counts is None:
            return LayerFigures(self._largest, {}, self._bounds)
        flushed, saturated, size = self._counts
        shares = {"flushed": flushed / size, "saturated": saturated / size}
        return LayerFigures(self._largest, shares, self._bounds)

    def add_segment(self, segment: LayerFigures) -> None:
        """Append the statistics [L] of the layers of a segment."""
        self._segments.append(segment)

    def all_figures(self) -> LayerFigures:
        """Return the statistics of all layers, concatenated over segments."""
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *self._segments)


def _without_nan(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Return x with infinity for NaN, because a maximum over devices may lose NaN."""
    return jnp.where(jnp.isnan(x), jnp.inf, x)
