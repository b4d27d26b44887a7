"""Compare activations between sizes of a model, and name what grows or shrinks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from data.encoding import padded_vocab_size
from data.sources import encoding_of, open_sources
from train.config import Config
from train.console import print_table
from train.coordinates.measure import measure, resize
from train.errors import FINISHED, NOT_PROVED, ConfigError, Mistake
from train.program import settle
from train.run.folder import run_folder
from train.run.page import write_page
from train.run.report import TEMPLATE, chart

MAX_EXPONENT = 0.25
_SMALLEST = 1e-6  # Below this root mean square, an activation counts as zero.
_BASE_DEPTH = 4  # of the models of several widths, if optimizer.base_depth is not set
_TEXTS = {"residual": "input", "attention": "attention", "mlp": "MLP"}

# The root mean squares of an activation and of its change, by place in the model.
Places = Mapping[str, Float[np.ndarray, "2"]]


class Growth(NamedTuple):
    """An activation at several sizes, which it follows to the power of `exponent`.

    name: such as "layer 2, MLP: change".
    values: root mean squares, one for each size.
    """

    name: str
    values: list[float]
    exponent: float

    @property
    def is_flat(self) -> bool:
        """Whether the activation does not depend on the size."""
        return abs(self.exponent) <= MAX_EXPONENT


def compare_sizes(
    config: Config, sizes_by_axis: Mapping[str, Sequence[int]], steps: int, output: str
) -> int:
    """Train models, print tables, draw curves, and return the exit code.

    Args:
        config: the run's config.
        sizes_by_axis: "width" has ascending widths of models of optimizer.base_depth
            layers, and "depth" ascending depths of models of optimizer.base_width.
        steps: the number of updates of each model.
        output: the path of the page with the curves.

    Raises:
        ConfigError: a model of one of the sizes breaks a rule, or the page cannot be
            written.
    """
    config = settle(config, padded_vocab_size(encoding_of(config.data)))
    sources, optimizer = open_sources(config.data), config.optimizer
    fixed_width = optimizer.base_width or config.model.embed_dim
    fixed_depth = optimizer.base_depth or _BASE_DEPTH
    steep, charts = list[str](), dict[str, Any]()
    for axis, sizes in sizes_by_axis.items():
        if not sizes:
            continue
        models = list[Places]()
        for size in sizes:
            is_width = axis == "width"
            width, depth = (size, fixed_depth) if is_width else (fixed_width, size)
            activations = measure(resize(config, width, depth), sources, steps)
            models.append(_by_place(axis, activations, depth))
            print(f"trained     {width} wide, {depth} deep", flush=True)
        growths = growths_of(sizes, models)
        headers = ["root mean square of", *(f"{axis} {n}" for n in sizes), "exponent"]
        print_table([_row(growth) for growth in growths], headers, axis)
        series = {g.name: [*zip(sizes, g.values, strict=True)] for g in growths}
        lines = {name: name for name in series}
        charts[axis] = [chart(series, f"Root mean squares by {axis}", lines, True)]
        steep += [
            f"{growth.name} follows the {axis} to the power of {growth.exponent:.2f}."
            for growth in growths
            if not growth.is_flat
        ]
    path = run_folder(output, "output")
    page = {"name": "coordinates", "tables": [], "axes": charts, "restarts": []}
    try:
        write_page(path, TEMPLATE, page)
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}; name another file"
        raise ConfigError([Mistake("output", str(path), rule)]) from None
    print(f"page        {path}")
    if steep:
        print(f"not flat    {steep[0]}")
        return NOT_PROVED
    print("flat        Activations and their changes do not depend on the size.")
    return FINISHED


def growths_of(sizes: Sequence[int], models: Sequence[Places]) -> list[Growth]:
    """Return how each activation and its change follow the size, in forward order."""
    growths = list[Growth]()
    for place in models[0]:
        values = np.stack([model[place] for model in models])
        logs = np.log2(np.maximum(_SMALLEST, values))
        exponents = np.polyfit(np.log2(sizes), logs, 1)[0]
        for i, figure in enumerate(("size", "change")):
            name, exponent = f"{place}: {figure}", float(exponents[i])
            growths.append(Growth(name, values[:, i].tolist(), exponent))
    return growths


def _by_place(
    axis: str, activations: Mapping[str, Float[np.ndarray, "2 L"]], depth: int
) -> Places:
    """Return the activations that models of several widths or depths have in common.

    What a layer adds to the residual stream is multiplied by the depth if that differs,
    because all layers together should add as much. The last layer's input is left out
    then, because the fraction of layers before it depends on the depth.
    """
    layers, factor = {f"layer {n}": n for n in range(depth)}, 1
    if axis == "depth":
        layers = {"first layer": 0, "middle layer": depth // 2, "last layer": depth - 1}
        factor = depth
    places = {
        f"{layer}, {text}": activations[name][:, n]
        * (1 if name == "residual" else factor)
        for layer, n in layers.items()
        for name, text in _TEXTS.items()
        if (layer, name) != ("last layer", "residual")
    }
    return places | {name: activations[name][:, 0] for name in ("features", "logits")}


def _row(growth: Growth) -> Sequence[str]:
    cells = (f"{value:.3g}" for value in growth.values)
    mark = "" if growth.is_flat else " *"
    return [growth.name, *cells, f"{growth.exponent:+.2f}{mark}"]
