"""Heat maps of per-layer metrics: one row a layer, and a shade for each value.

train/core/numerics.py defines the metrics. A map has at most 120 columns; with more
steps, a column holds the largest value of several steps.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train.run.goodput import finite_float

_TITLES = {
    "residual": "Largest value into each layer",
    "attention": "Largest value of attention",
    "mlp": "Largest value of MLP or experts",
    "grad_largest": "Largest gradient of each layer",
    "grad_norm": "Norm of gradients of each layer",
    "update_ratio": "Update over weight of each layer, RMS",
    "flushed": "Share that eight bits flush to zero",
    "saturated": "Share at the largest value of eight bits",
}
_LAYER_METRIC = re.compile(r"numerics/(.+)/\d+")
_MAX_COLUMNS = 120
_RANGE = 1e6  # ratio of the highest to the lowest value with a distinct shade


def heat_maps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a heat map for each per-layer metric in the rows.

    A map has a title, the steps of its columns, and the values of each layer, with None
    for values that were not finite. The shades span the values from `low` to `high`.
    """
    matches = (_LAYER_METRIC.fullmatch(key) for row in rows for key in row)
    names = dict.fromkeys((*_TITLES, *(key[1] for key in matches if key)))
    return [heat_map for name in names for heat_map in _heat_map(name, rows)]


def _heat_map(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    prefix = f"numerics/{name}/"
    columns = dict[float, dict[int, float | None]]()
    for row in rows:
        values_by_layer = {
            int(key.removeprefix(prefix)): finite_float(value)
            for key, value in row.items()
            if key.startswith(prefix)
        }
        if values_by_layer and (step := finite_float(row.get("step"))) is not None:
            columns[step] = values_by_layer
    nonzero_values = [v for column in columns.values() for v in column.values() if v]
    if not nonzero_values:
        return
    high = max(nonzero_values)
    steps_per_column = math.ceil(len(columns) / _MAX_COLUMNS)
    steps = sorted(columns)
    starts = range(0, len(steps), steps_per_column)
    groups = [steps[start : start + steps_per_column] for start in starts]
    layers = defaultdict[int, list[float | None]](list)
    for group in groups:
        for layer in columns[group[0]]:
            values = [columns[step].get(layer) for step in group]
            present = [value for value in values if value is not None]
            layers[layer].append(max(present) if len(present) == len(values) else None)
    yield {
        "title": _TITLES.get(name, name),
        "steps": [group[-1] for group in groups],
        "layers": [layers[layer] for layer in sorted(layers)],
        "low": max(min(nonzero_values), high / _RANGE),
        "high": high,
    }
