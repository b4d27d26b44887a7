"""Numbers of each layer: how large they are, and which layer is to blame for a bad one.

A watched step (`log.numerics_interval_steps`) has these among its metrics, float32 [L],
reduced over all devices and microbatches:

    numerics/residual       largest absolute value of what goes into the layer
    numerics/attention      ... of what its attention gives, before it is added
    numerics/mlp            ... of what its MLP or experts give
    numerics/grad_largest   ... of its weights' gradients
    numerics/grad_norm      norm of these
    numerics/update_ratio   RMS of the update over RMS of the weights
    numerics/flushed        share of the operands that its linear layers and experts
                            multiply by weights that eight bits flush to zero
    numerics/saturated      ... and that they round to their largest value

The last two are there where `model.compute_dtype` has eight bits. What is not finite
counts as infinite. A step that is not watched is another program, without any of it.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.params import STACKED, in_layer_order
from model.taps import Noted

Reduce = Callable[[jax.Array], jax.Array]
Combine = Callable[[jax.Array, jax.Array], jax.Array]
PREFIX = "numerics/"
_WORDS = {
    "residual": "what goes into it",
    "attention": "its attention",
    "mlp": "its MLP",
    "grad_largest": "its largest gradient",
    "grad_norm": "the norm of its gradients",
}
_ACTIVATIONS = "residual", "attention", "mlp"
_GRADIENTS = "grad_largest", "grad_norm"
# The square of what is larger, which norms take, is infinite in float32.
_TOO_LARGE = math.sqrt(jnp.finfo(jnp.float32).max)
_TINY = float(jnp.finfo(jnp.float32).tiny)
_MUCH = 4.0  # times what it was when last seen


def numerics(
    noted: Noted, grads: Any, before: Any, after: Any
) -> dict[str, Float[Array, "L"]]:
    """Return the figures of a watched step.

    Args:
        noted: by the layers' taps.
        grads: tree of gradients, before clipping.
        before: tree of parameters.
        after: likewise, once the optimizer has moved them.
    """
    moved = jax.tree.map(lambda new, old: new.astype(jnp.float32) - old, after, before)
    figures = {
        **noted.largest,
        **noted.shares,
        "grad_largest": _by_layer(grads, _largest, jnp.maximum),
        "grad_norm": jnp.sqrt(_by_layer(grads, _squares, jnp.add)),
        "update_ratio": jnp.sqrt(
            _by_layer(moved, _squares, jnp.add) / _by_layer(before, _squares, jnp.add)
        ),
    }
    return {PREFIX + name: values for name, values in figures.items()}


def by_layer(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a watched step as lines of metrics have them; else none."""
    figures = {name: v for name, v in metrics.items() if name.startswith(PREFIX)}
    return {
        f"{name}/{layer}": float(f"{value:.4g}")
        for name, values in figures.items()
        for layer, value in enumerate(values)
    }


class Culprit(NamedTuple):
    """What is to blame for a bad step: a quantity of a layer, counted from 0."""

    quantity: str
    layer: int
    value: float

    def __str__(self) -> str:
        value = f"{self.value:.3g}" if math.isfinite(self.value) else "not finite"
        return f"layer {self.layer}: {_WORDS[self.quantity]} is {value}"


def culprit(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> Culprit | None:
    """Name what is to blame for a step that was left out; None where nothing shows.

    That is, in the order of the forward pass, the first result too large for its square
    to be finite; else, since gradients go the other way, the last layer whose gradients
    are; else what has grown most since an earlier step, if it is several times as
    large.

    Args:
        now: metrics of that step, a watched one.
        before: those of an earlier one that was not left out, if there was one.
    """
    forward = [*_values(now, _ACTIVATIONS)]
    backward = [*_values(now, _GRADIENTS)]
    for found in (forward, backward[::-1]):
        for own in found:
            if not own.value < _TOO_LARGE:
                return own
    if before is None:
        return None
    earlier = [*_values(before, _ACTIVATIONS), *_values(before, _GRADIENTS)]
    pairs = zip([*forward, *backward], earlier, strict=True)
    grown = [(own.value / max(then.value, _TINY), own) for own, then in pairs]
    most, found = max(grown)
    return found if most > _MUCH else None


def _values(figures: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[Culprit]:
    """Yield the figures of some quantities, layer by layer."""
    for layer in range(len(figures[PREFIX + names[0]])):
        for name in names:
            yield Culprit(name, layer, float(figures[PREFIX + name][layer]))


def _by_layer(tree: Any, reduce: Reduce, combine: Combine) -> Float[Array, "L"]:
    """Reduce the parameters of each layer to one value, in the order of layers."""
    stacks = {
        name: functools.reduce(combine, map(reduce, jax.tree.leaves(tree[name])))
        for name in STACKED
        if name in tree
    }
    return in_layer_order(stacks)


def _largest(stacked: Float[Array, "L *dims"]) -> Float[Array, "L"]:
    x = jnp.abs(stacked.astype(jnp.float32))
    x = jnp.where(jnp.isfinite(x), x, jnp.inf)
    return jnp.max(x, axis=tuple(range(1, x.ndim)))


def _squares(stacked: Float[Array, "L *dims"]) -> Float[Array, "L"]:
    x = jnp.square(stacked.astype(jnp.float32))
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))
