"""Draw the sweeps of `benchmarks.rates`; needs `pip install -e ".[docs]"`.

python -m benchmarks.rates_chart rates.png rates.json [more.json ...]

Each optimizer has up to four panels for each device that trained with it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

_PER_ROW = 5


def vertex(result: dict[str, Any]) -> float:
    """Return the best factor: the vertex of a parabola through the three best means."""
    losses = np.nan_to_num(np.mean(result["losses"], axis=1), nan=np.inf)
    exponents = np.log2(result["factors"])
    best = int(np.argmin(losses))
    around = slice(max(0, best - 1), best + 2)
    if not 0 < best < len(losses) - 1 or not np.all(np.isfinite(losses[around])):
        return float(2 ** exponents[best])
    a, b, _ = np.polyfit(exponents[around], losses[around], 2)
    return float(2 ** (-b / (2 * a)))


def draw(path: Path, sweeps: list[tuple[str, dict[str, Any]]]) -> None:
    """Draw the loss against the rate, with and without transfer.

    `sweeps` are names and results of sweeps, as `benchmarks.rates` writes them. A panel
    has the sizes of one optimizer on one device. Panels with fewer than two sizes are
    left out, and the others fill rows of `_PER_ROW`.
    """
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]
    from matplotlib.ticker import (  # pyright: ignore[reportMissingImports]
        NullFormatter,
    )

    panels = _panels(sweeps)
    num_rows = -(-len(panels) // _PER_ROW)
    figure, grid = plt.subplots(
        num_rows,
        _PER_ROW,
        figsize=(3.2 * _PER_ROW, 3 * num_rows),
        squeeze=False,
    )
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
        _draw_panel(axes, curves)
        axes.set_title(title, fontsize=8)
        axes.xaxis.set_minor_formatter(NullFormatter())
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def _panels(sweeps: list[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the sweeps of each panel, by its title and the size of the model."""
    columns = {
        "width, no transfer": lambda n: n.endswith("x4"),
        "width, completep": lambda n: n.endswith(("x4 completep", " 64x4")),
        "depth, no transfer": lambda n: " 64x" in n and "completep" not in n,
        "depth, completep": lambda n: " 64x" in n and ("comp" in n or "64x4" in n),
    }
    panels = {}
    for optimizer in sorted({_trainer(name, result) for name, result in sweeps}):
        for title, belongs in columns.items():
            curves = {
                name.split()[1]: result
                for name, result in sweeps
                if _trainer(name, result) == optimizer and belongs(name)
            }
            if len(curves) > 1:
                panels[f"{optimizer}: {title}"] = curves
    return panels


def _draw_panel(axes: Any, curves: dict[str, Any]) -> None:
    """Draw mean and range of the losses of each size, and its best rate."""
    means = []
    for size, result in curves.items():
        rates = np.array(result["factors"]) * result["learning_rate"]
        losses = np.array(result["losses"])
        means.append(losses.mean(1))
        (line,) = axes.plot(rates, means[-1], marker="o", markersize=3, label=size)
        color = line.get_color()
        axes.fill_between(rates, losses.min(1), losses.max(1), alpha=0.2, color=color)
        best = vertex(result) * result["learning_rate"]
        axes.axvline(best, color=color, linewidth=0.7, linestyle=":")
    lowest = np.min(np.concatenate(means))
    highest = np.max(np.concatenate(means))
    axes.set_ylim(lowest - 0.02, min(lowest + 0.5, highest + 0.02))
    axes.set(xscale="log", xlabel="learning rate")
    axes.legend(fontsize=7)


def _trainer(name: str, result: dict[str, Any]) -> str:
    return f"{name.split()[0]} ({result['device']})"


if __name__ == "__main__":
    files = [json.loads(Path(name).read_text()) for name in sys.argv[2:]]
    # A file of benchmarks/results has these sweeps in a part of its own.
    parts = [file.get("transfer", file) for file in files]
    draw(Path(sys.argv[1]), [sweep for part in parts for sweep in part.items()])
