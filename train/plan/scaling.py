"""What more slices give: the same rows a slice, more of them.

From one program for several slices. With their number n grow the terms (n-1)/n of the
rings, the hops that each collective starts, and how far the slowest slice is behind the
mean; with a single slice the data center's network is idle. Between TPU slices one chip
of each makes a ring; rings of GPUs go through all members in all nodes, in a single one
over NVLink.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from train.config import Config
from train.console import print_table
from train.hardware.chips import Chip
from train.hardware.interconnect import num_parts, num_slices
from train.mesh_sizes import num_shards
from train.plan.cost import CollectiveTotal, StepCost, sent_bytes
from train.plan.roofline import FAR, Prediction, Range, predict
from train.units import format_bytes, format_count, format_seconds

# Of a platform: its parts, what joins them, what a public run showed.
_WORDS = {
    "tpu": ("slices", "DCN", "four public runs on v5e, up to 32, within 3 points"),
    "gpu": ("nodes", "network", "no public series judged it"),
}
POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 199)


@dataclass(frozen=True)
class Scaled:
    """A number of slices.

    sent: bytes that each chip sends to other slices in a step.
    efficiency: tokens a second and chip, over those of a single slice.
    """

    slices: int
    sent: float
    prediction: Prediction
    efficiency: Range


def weak_scaling(
    cost: StepCost,
    config: Config,
    mesh: Mesh,
    chip: Chip,
    points: Iterable[int] = POINTS,
) -> list[Scaled]:
    """Predict the speed of other numbers of slices.

    Arguments: as `predict`, of a program for several slices.

    Returns:
        [] for a program of one slice, or whose stages lie in several: more of them
        would need more layers.

    Raises:
        NotStated: as `predict`.
    """
    compiled = num_slices(mesh.devices.flat)
    if compiled < 2 or num_parts(mesh, ["pipeline"]) > 1:
        return []

    def at(slices: int) -> tuple[float, Prediction]:
        sent = [_scaled(total, mesh, slices) for total in cost.sent]
        prediction = predict(replace(cost, sent=sent), config, mesh, chip, slices)
        more = slices / compiled
        far = sum(total.sent for total in sent if total.network in FAR)
        return far * chip.devices, replace(
            prediction,
            tokens=round(prediction.tokens * more),
            devices=round(prediction.devices * more),
            chips=round(prediction.chips * more),
        )

    alone = at(1)[1].step_s
    rows = []
    for slices in points:
        sent, prediction = at(slices)
        step = prediction.step_s
        parts = sorted((alone.low / step.low, alone.high / step.high))
        rows.append(Scaled(slices, sent, prediction, Range(*parts)))
    return rows


def print_weak_scaling(rows: Sequence[Scaled]) -> None:
    """Print one line a number of slices, or of nodes."""
    unit, network, measured = _WORDS[rows[0].prediction.platform]
    print_table(
        [
            [
                f"{row.slices:,}",
                f"{row.prediction.chips:,}",
                format_bytes(row.sent),
                f"{format_seconds(row.prediction.step_s.low)} to "
                f"{format_seconds(row.prediction.step_s.high)}",
                format_count(row.prediction.middle.tokens_per_second),
                f"{row.efficiency.low:.1%} to {row.efficiency.high:.1%}",
            ]
            for row in rows
        ],
        [unit, "chips", f"{network} a chip", "a step", "tokens/s", "kept"],
        f"more {unit} (bytes of rings, latency of each hop, the slowest of them; "
        f"{measured})",
    )


def _scaled(total: CollectiveTotal, mesh: Mesh, slices: int) -> CollectiveTotal:
    """Return a collective between slices as so many of them need it."""
    if total.network not in FAR:
        return total
    near = 1  # members in a slice
    if total.network != "DCN":
        near = num_shards(mesh.shape, total.axes) // num_parts(mesh, total.axes)
    if slices == near == 1:
        return replace(total, count=0, sent=0.0)
    old, now = (
        sent_bytes(total.kind, 1, near * parts)
        for parts in (num_slices(mesh.devices.flat), slices)
    )
    network = "NVLink" if slices == 1 else total.network
    return replace(total, network=network, sent=total.sent * now / old)
