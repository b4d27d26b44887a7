"""Compare activations between sizes of a model, and name what grows or shrinks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from data.catalog import text_store
from data.sources import open_sources
from data.storage import is_remote
from train.console import print_table
from train.coordinates.measure import ModelFamily, measure
from train.errors import FINISHED, NOT_PROVED, writing
from train.page import write_page
from train.resolve.program import make_program
from train.run.folder import run_folder
from train.run.report import TEMPLATE, chart

MAX_EXPONENT = 0.25
_SMALLEST = 1e-6  # Below this root mean square, an activation counts as zero.
_BASE_DEPTH = 4  # of the models of several widths, if optimizer.base_depth is not set
_TEXTS = {"residual": "input", "attention": "attention", "mlp": "MLP"}

# The (size, root mean square) points of each activation, in forward order. The names
# are like "layer 2, MLP: change".
Curves = Mapping[str, Sequence[tuple[int, float]]]


def compare_sizes(
    family: ModelFamily,
    sizes_by_axis: Mapping[str, Sequence[int]],
    steps: int,
    output: str,
) -> int:
    """Train models, print tables, draw curves, and return the exit code.

    Args:
        family: the models to compare.
        sizes_by_axis: "width" has ascending widths of models of optimizer.base_depth
            layers, and "depth" ascending depths of models of optimizer.base_width.
        steps: the number of updates of each model.
        output: the path of the page with the curves.

    Raises:
        ConfigError: a model of one of the sizes breaks a rule, or the page cannot be
            written.
    """
    path = run_folder(output, "output")
    if not is_remote(path):
        with writing("output", path):  # a mistake is told before models are trained
            path.parent.mkdir(parents=True, exist_ok=True)
    steep = list[str]()
    charts = dict[str, Any]()
    tables = list[Any]()
    for axis, sizes in sizes_by_axis.items():
        if not sizes:
            continue
        curves = _measure_curves(family, axis, sizes, steps)
        rows = list[list[str]]()
        for name, curve in curves.items():
            exponent = exponent_of(curve)
            is_steep = abs(exponent) > MAX_EXPONENT
            values = {size: f"{value:.3g}" for size, value in curve}
            cells = [values.get(size, "-") for size in sizes]
            mark = " *" if is_steep else ""
            rows.append([name, *cells, f"{exponent:+.2f}{mark}"])
            if is_steep:
                power = f"to the power of {exponent:.2f}."
                steep.append(f"{name} follows the {axis} {power}")
        headers = ["root mean square of", *(f"{axis} {n}" for n in sizes), "exponent"]
        print_table(rows, headers, axis)
        tables.append((f"By {axis}", headers, rows))
        lines = {name: name for name in curves}
        title = f"Root mean squares by {axis}"
        charts[axis] = [chart(curves, title, lines, from_zero=True)]
    page = {"name": "coordinates", "tables": tables, "axes": charts, "restarts": []}
    with writing("output", path):
        write_page(path, TEMPLATE, page)
    print(f"page        {path}")
    if steep:
        print(f"not flat    {steep[0]}")
        return NOT_PROVED
    print("flat        Activations and their changes do not depend on the size.")
    return FINISHED


def exponent_of(curve: Sequence[tuple[int, float]]) -> float:
    """Return the power of the size that the values of a curve follow."""
    sizes, values = np.log2(np.maximum(_SMALLEST, curve)).T
    return float(np.polyfit(sizes, values, 1)[0])


def _measure_curves(
    family: ModelFamily, axis: str, sizes: Sequence[int], steps: int
) -> Curves:
    """Train a model of each size, and return the curves of activations.

    A place that only one of the models has is left out.
    """
    config = family.config
    optimizer = config.optimizer
    sources = open_sources(config.data, text_store)
    curves = defaultdict[str, list[tuple[int, float]]](list)
    for size in sizes:
        width = optimizer.base_width or config.model.embed_dim
        depth = optimizer.base_depth or _BASE_DEPTH
        width, depth = (size, depth) if axis == "width" else (width, size)
        program = make_program(family.resized(width, depth), jax.devices()[:1])
        activations = measure(program, sources, steps)
        print(f"trained     {width} wide, {depth} deep", flush=True)
        for place, pair in _by_place(axis, activations, depth).items():
            for figure, value in zip(("size", "change"), pair.tolist(), strict=True):
                curves[f"{place}: {figure}"].append((size, value))
    return {name: curve for name, curve in curves.items() if len(curve) > 1}


def _by_place(
    axis: str, activations: Mapping[str, Float[np.ndarray, "2 L"]], depth: int
) -> dict[str, Float[np.ndarray, "2"]]:
    """Return the activations that models of several widths or depths have in common.

    What a layer adds to the residual stream is multiplied by the depth if that differs,
    because all layers together should add as much. Inputs are compared then only where
    the same fraction of the layers comes before, which is none or half of them. The
    only layer of a model is its first: unlike later layers, it reads the embedding.
    """
    layers = {f"layer {n}": n for n in range(depth)}
    factor = 1
    if axis == "depth":
        layers = {"first layer": 0}
        if depth > 1:
            layers |= {"middle layer": depth // 2, "last layer": depth - 1}
        factor = depth
    places = {
        f"{layer}, {text}": activations[name][:, n]
        * (1 if name == "residual" else factor)
        for layer, n in layers.items()
        for name, text in _TEXTS.items()
        if axis == "width" or name != "residual" or 2 * n in (0, depth)
    }
    return places | {name: activations[name][:, 0] for name in ("features", "logits")}
