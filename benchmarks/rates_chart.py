"""Draw the sweeps of `benchmarks.rates`; needs matplotlib.

python -m benchmarks.rates_chart rates.png rates.json [more.json ...]

Each optimizer has a row of panels for each device that trained with it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def vertex(result: dict[str, Any]) -> float:
    """Return the best factor: the vertex of a parabola through the three best means."""
    losses = np.nan_to_num(np.mean(result["losses"], axis=1), nan=np.inf)
    exponents, best = np.log2(result["factors"]), int(np.argmin(losses))
    around = slice(max(0, best - 1), best + 2)
    if not 0 < best < len(losses) - 1 or not np.all(np.isfinite(losses[around])):
        return float(2 ** exponents[best])
    a, b, _ = np.polyfit(exponents[around], losses[around], 2)
    return float(2 ** (-b / (2 * a)))


def draw(path: Path, sweeps: list[tuple[str, dict[str, Any]]]) -> None:
    """Draw the loss against the rate, with and without transfer.

    `sweeps` are names and results of sweeps, as `benchmarks.rates` writes them.
    """
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

    names = sorted({_row(name, result) for name, result in sweeps})
    columns = {
        "width, no transfer": lambda n: n.endswith("x4"),
        "width, completep": lambda n: n.endswith(("x4 completep", " 64x4")),
        "depth, no transfer": lambda n: " 64x" in n and "completep" not in n,
        "depth, completep": lambda n: " 64x" in n and ("comp" in n or "64x4" in n),
    }
    figure, all_axes = plt.subplots(
        len(names),
        len(columns),
        figsize=(4 * len(columns), 3 * len(names)),
        squeeze=False,
    )
    for row, name in zip(all_axes, names, strict=True):
        for axes, (title, belongs) in zip(row, columns.items(), strict=True):
            for key, result in sweeps:
                if _row(key, result) != name or not belongs(key):
                    continue
                rates = np.array(result["factors"]) * result["learning_rate"]
                losses = np.array(result["losses"])
                mean = losses.mean(1)
                label = key.split()[1]
                (line,) = axes.plot(rates, mean, marker="o", markersize=3, label=label)
                axes.fill_between(
                    rates,
                    losses.min(1),
                    losses.max(1),
                    alpha=0.2,
                    color=line.get_color(),
                )
                best = vertex(result) * result["learning_rate"]
                axes.axvline(best, color=line.get_color(), linewidth=0.7, linestyle=":")
            if len(axes.lines) < 4:  # a line and its vertex for each model
                axes.set_visible(False)
                continue
            axes.set_title(f"{name}: {title}", fontsize=9)
            axes.set(xscale="log", xlabel="learning rate")
            low = min(line.get_ydata().min() for line in axes.lines[::2])
            axes.set_ylim(low - 0.02, low + 0.5)
            axes.set_xlim(6e-4, 0.2)
            axes.xaxis.set_minor_formatter(plt.NullFormatter())
            axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=70)


def _row(name: str, result: dict[str, Any]) -> str:
    return f"{name.split()[0]} ({result['device']})"


if __name__ == "__main__":
    files = [json.loads(Path(name).read_text()) for name in sys.argv[2:]]
    # A file of benchmarks/results has these sweeps in a part of its own.
    parts = [file.get("transfer", file) for file in files]
    draw(Path(sys.argv[1]), [sweep for part in parts for sweep in part.items()])
