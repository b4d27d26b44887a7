"""Per-layer statistics that show which layer causes a bad step.

The metrics of a watched step (`log.numerics_interval_steps`) include these figures,
float32 [L], reduced over all devices and microbatches:

    numerics/residual       the largest absolute value of the layer's input
    numerics/attention      ... of attention's output, before the residual addition
    numerics/mlp            ... of the output of the MLP or of the experts
    numerics/grad_largest   ... of the gradients of the layer's weights
    numerics/grad_norm      the norm of these gradients
    numerics/update_ratio   the RMS of the update over the RMS of the weights
    numerics/flushed        the share of operands of linear layers and experts that
                            the 8-bit dtype flushes to zero
    numerics/saturated      ... that it rounds to the largest value

The last two exist if `model.compute_dtype` has eight bits. Values that are not finite
count as infinite. Other steps run a program that does not compute these figures.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.params import LAYERS, in_layer_order, layer_trees
from model.taps import LayerFigures

Reduce = Callable[[jax.Array], jax.Array]
Combine = Callable[[jax.Array, jax.Array], jax.Array]
PREFIX = "numerics/"
_DESCRIPTIONS = {
    "residual": "its input",
    "attention": "its attention",
    "mlp": "its MLP",
    "grad_largest": "its largest gradient",
    "grad_norm": "the norm of its gradients",
}
_ACTIVATIONS = "residual", "attention", "mlp"
_GRADIENTS = "grad_largest", "grad_norm"
# A norm squares its values, and the square of a larger value is infinite in float32.
_TOO_LARGE = math.sqrt(jnp.finfo(jnp.float32).max)
_TINY = float(jnp.finfo(jnp.float32).tiny)
_GROWTH = 4.0  # A quantity that has grown by more than this factor is suspicious.


def compute_layer_metrics(
    figures: LayerFigures, grads: Any, params: Any, new_params: Any
) -> dict[str, Float[Array, "L"]]:
    """Return the layer metrics of a watched step; `grads` are not clipped yet."""
    updates = jax.tree.map(
        lambda new, old: new.astype(jnp.float32) - old, new_params, params
    )
    values_by_name = {
        **figures.largest,
        **figures.shares,
        "grad_largest": _reduce_layers(grads, _max_abs, jnp.maximum),
        "grad_norm": jnp.sqrt(_reduce_layers(grads, _sum_squares, jnp.add)),
        "update_ratio": jnp.sqrt(
            _reduce_layers(updates, _sum_squares, jnp.add)
            / _reduce_layers(params, _sum_squares, jnp.add)
        ),
    }
    return {PREFIX + name: values for name, values in values_by_name.items()}


def flat_figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return a watched step's figures, under the keys that metrics.jsonl has for them.

    They are empty for other steps.
    """
    figures = {name: v for name, v in metrics.items() if name.startswith(PREFIX)}
    return {
        f"{name}/{layer}": float(f"{value:.4g}")
        for name, values in figures.items()
        for layer, value in enumerate(values)
    }


class Culprit(NamedTuple):
    """The quantity that is to blame for a bad step. Layers count from 0."""

    quantity: str
    layer: int
    value: float

    def __str__(self) -> str:
        value = f"{self.value:.3g}" if math.isfinite(self.value) else "not finite"
        return f"layer {self.layer}: {_DESCRIPTIONS[self.quantity]} is {value}"


def find_culprit(
    metrics: Mapping[str, Any], earlier: Mapping[str, Any] | None
) -> Culprit | None:
    """Return the quantity to blame for a skipped step, or None if none stands out.

    The first of these that exists is to blame:

    1. of the forward results whose square is not finite, the one in the first layer;
    2. of the gradients whose square is not finite, the one in the last layer, which the
       backward pass computes first;
    3. the quantity that has grown most since an earlier step.

    Both steps must be watched, and the earlier step must not be skipped.
    """
    forward = [*_candidates(metrics, _ACTIVATIONS)]
    backward = [*_candidates(metrics, _GRADIENTS)]
    for candidate in (*forward, *backward[::-1]):
        if not candidate.value < _TOO_LARGE:
            return candidate
    if earlier is None:
        return None
    previous = [
        *_candidates(earlier, _ACTIVATIONS),
        *_candidates(earlier, _GRADIENTS),
    ]
    growth, candidate = max(
        (new.value / max(old.value, _TINY), new)
        for new, old in zip([*forward, *backward], previous, strict=True)
    )
    return candidate if growth > _GROWTH else None


def _candidates(
    figures: Mapping[str, Any], names: tuple[str, ...]
) -> Iterator[Culprit]:
    """Yield a candidate for each layer and each name, layer by layer."""
    for layer in range(len(figures[PREFIX + names[0]])):
        for name in names:
            yield Culprit(name, layer, float(figures[PREFIX + name][layer]))


def _reduce_layers(tree: Any, reduce: Reduce, combine: Combine) -> Float[Array, "L"]:
    """Reduce the parameters of each layer to one value, in the order of layers."""

    def reduce_stack(stack: Any) -> Float[Array, "_"]:
        return functools.reduce(combine, map(reduce, jax.tree.leaves(stack)))

    segments = layer_trees(tree[LAYERS])
    return jnp.concatenate([in_layer_order([*map(reduce_stack, s)]) for s in segments])


def _max_abs(stacked: Float[Array, "L *dims"]) -> Float[Array, "L"]:
    x = jnp.abs(stacked.astype(jnp.float32))
    x = jnp.where(jnp.isfinite(x), x, jnp.inf)
    return jnp.max(x, axis=tuple(range(1, x.ndim)))


def _sum_squares(stacked: Float[Array, "L *dims"]) -> Float[Array, "L"]:
    x = jnp.square(stacked.astype(jnp.float32))
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))
