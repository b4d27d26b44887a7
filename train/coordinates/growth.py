"""Compare activations between sizes of a model, and name what grows or shrinks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from data.encoding import padded_vocab_size
from data.sources import encoding_of, open_sources
from train.config import MESH_AXES, Config, DcnConfig
from train.console import print_table
from train.coordinates.measure import Activations, measure, resize
from train.errors import FINISHED, NOT_PROVED, ConfigError, Mistake
from train.program import settle
from train.run.folder import run_folder
from train.run.page import write_page
from train.run.report import TEMPLATE, chart

MAX_EXPONENT = 0.25
_SMALLEST = 1e-6  # Below this root mean square, an activation counts as zero.
_BASE_DEPTH = 4  # of the models of several widths, if optimizer.base_depth is not set
_POSITIONS = "first layer", "middle layer", "last layer", "output"
_TEXTS = {"residual": "input", "attention": "attention", "mlp": "MLP"}


class Growth(NamedTuple):
    """An activation at several sizes, which it follows to the power of `exponent`.

    axis: "width" or "depth".
    name: such as "layer 2, MLP: change".
    values: root mean squares, by size.
    """

    axis: str
    name: str
    values: dict[int, float]
    exponent: float

    @property
    def is_flat(self) -> bool:
        """Whether the activation does not depend on the size."""
        return abs(self.exponent) <= MAX_EXPONENT


def compare_sizes(
    config: Config,
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    steps: int,
    output: str,
) -> int:
    """Train models, print tables, draw curves, and return the exit code.

    Args:
        config: the run's config.
        widths: ascending widths of models of optimizer.base_depth layers.
        depths: ascending depths of models that are optimizer.base_width wide.
        steps: the number of updates of each model.
        output: the path of the page with the curves.

    Raises:
        ConfigError: a model of one of the sizes breaks a rule, or the page cannot be
            written.
    """
    one_device = dict.fromkeys(MESH_AXES, 1)
    mesh = replace(config.mesh, **one_device, dcn=DcnConfig())
    config = replace(config, mesh=mesh)
    config = settle(config, padded_vocab_size(encoding_of(config.data)))
    optimizer, growths, charts = config.optimizer, list[Growth](), dict[str, Any]()
    fixed_width = optimizer.base_width or config.model.embed_dim
    fixed_depth = optimizer.base_depth or _BASE_DEPTH
    for axis, sizes in (("width", widths), ("depth", depths)):
        is_depth, found = axis == "depth", {}
        for size in sizes:
            width, depth = (fixed_width, size) if is_depth else (size, fixed_depth)
            small = resize(config, width, depth)
            activations = measure(small, open_sources(small.data), steps)
            found[size] = _by_position(activations, depth) if is_depth else activations
            print(f"trained     {width} wide, {depth} deep", flush=True)
        growths += (of_axis := growths_of(axis, found))
        headers = ["root mean square of", *(f"{axis} {n}" for n in sizes), "exponent"]
        print_table([_row(growth) for growth in of_axis], headers, axis)
        series = {g.name: [*g.values.items()] for g in of_axis}
        lines = {g.name: g.name for g in of_axis}
        charts[axis] = [chart(series, f"Root mean squares by {axis}", lines, True)]
    path = run_folder(output, "output")
    page = {"name": "coordinates", "tables": [], "axes": charts, "restarts": []}
    try:
        write_page(path, TEMPLATE, page)
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}; name another file"
        raise ConfigError([Mistake("output", str(path), rule)]) from None
    print(f"page        {path}")
    if not (steep := [growth for growth in growths if not growth.is_flat]):
        print("flat        Activations and their changes do not depend on the size.")
        return FINISHED
    power = f"follows the {steep[0].axis} to the power of {steep[0].exponent:.2f}"
    print(f"not flat    {steep[0].name} {power}.")
    return NOT_PROVED


def growths_of(
    axis: str, by_size: Mapping[int, Mapping[tuple[int, str], Activations]]
) -> list[Growth]:
    """Return how each activation and its change follow the size, in forward order."""
    growths = list[Growth]()
    sizes = np.log2([*by_size])
    order = {name: i for i, name in enumerate((*_TEXTS, "features", "logits"))}
    keys = {key for found in by_size.values() for key in found}
    for layer, name in sorted(keys, key=lambda key: (key[0], order[key[1]])):
        owner = f"layer {layer}" if axis == "width" else _POSITIONS[layer]
        place = f"{owner}, {_TEXTS[name]}" if name in _TEXTS else name
        for field in Activations._fields:
            values = {n: getattr(f[layer, name], field) for n, f in by_size.items()}
            logs = np.log2([max(_SMALLEST, value) for value in values.values()])
            exponent = float(np.polyfit(sizes, logs, 1)[0])
            growths.append(Growth(axis, f"{place}: {field}", values, exponent))
    return growths


def _by_position(
    activations: Mapping[tuple[int, str], Activations], depth: int
) -> dict[tuple[int, str], Activations]:
    """Return the activations of the layers at _POSITIONS, by index of the position.

    What a layer adds to the residual stream is multiplied by the depth, because all
    layers together should add as much. The last layer's input is left out, because the
    fraction of layers before it depends on the depth.
    """
    layers = dict(enumerate((0, depth // 2, depth - 1, depth)))
    return {
        (position, name): Activations(
            *(depth * x if name in ("attention", "mlp") else x for x in values)
        )
        for position, layer in layers.items()
        for (number, name), values in activations.items()
        if number == layer and (position, name) != (2, "residual")
    }


def _row(growth: Growth) -> Sequence[str]:
    cells = (f"{value:.3g}" for value in growth.values.values())
    mark = "" if growth.is_flat else " *"
    return [growth.name, *cells, f"{growth.exponent:+.2f}{mark}"]
