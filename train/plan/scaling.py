"""Weak scaling: predict the speed of more slices with the same rows on each.

The prediction starts from one program for several slices. Three costs grow with the
number n of slices: the factor (n-1)/n of ring traffic, the start-up of each hop, and
the delay of the slowest slice. A single slice does not use the data center's network.
Between TPU slices a ring has one chip of each slice. A ring of GPUs has all GPUs
of its group on all nodes, and uses NVLink if there is only one node.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from train.config import Config
from train.console import print_table
from train.hardware.chips import Chip
from train.hardware.interconnect import num_slices, num_slices_along
from train.mesh_sizes import num_shards
from train.plan.cost import CollectiveTotal, StepCost, sent_bytes
from train.plan.rates import FAR
from train.plan.roofline import Prediction, Range, predict
from train.units import format_bytes, format_count, format_seconds

# The unit of scaling, its network, and the error seen in public runs, by platform.
_LABELS = {
    "tpu": ("slices", "DCN", "four public runs on v5e, up to 32, within 3 points"),
    "gpu": ("nodes", "network", "not compared with public runs"),
}
SLICE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 199)


@dataclass(frozen=True)
class ScalingPoint:
    """The prediction for a number of slices.

    sent: the bytes that each chip sends to other slices in a step.
    efficiency: tokens per second and chip, relative to a single slice.
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
    slice_counts: Iterable[int] = SLICE_COUNTS,
) -> list[ScalingPoint]:
    """Predict the speed of a program on other numbers of slices.

    The arguments are those of `predict`; `slice_counts` are the numbers of slices.

    Returns:
        A point for each number of slices; [] for a program on one slice, or with
        pipeline stages across slices, because more stages need more layers.

    Raises:
        NotStated: if the vendor does not state a rate that the step needs.
    """
    planned_slices = num_slices(mesh.devices.flat)
    if planned_slices < 2 or num_slices_along(mesh, ["pipeline"]) > 1:
        return []

    def predict_at(slices: int) -> tuple[float, Prediction]:
        sections = tuple(
            replace(s, sent=[_scale_total(total, mesh, slices) for total in s.sent])
            for s in cost.sections
        )
        scaled = replace(cost, sections=sections)
        prediction = predict(scaled, config, mesh, chip, slices)
        growth = slices / planned_slices
        far_bytes = sum(total.sent for total in scaled.sent if total.network in FAR)
        return far_bytes * chip.devices, replace(
            prediction,
            tokens=round(prediction.tokens * growth),
            devices=round(prediction.devices * growth),
            chips=round(prediction.chips * growth),
        )

    single = predict_at(1)[1].step_s
    rows = []
    for slices in slice_counts:
        num_bytes, prediction = predict_at(slices)
        step = prediction.step_s
        low, high = sorted((single.low / step.low, single.high / step.high))
        rows.append(ScalingPoint(slices, num_bytes, prediction, Range(low, high)))
    return rows


def print_weak_scaling(rows: Sequence[ScalingPoint]) -> None:
    """Print a table with one row for each number of slices or nodes."""
    unit, network, accuracy = _LABELS[rows[0].prediction.platform]
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
        [unit, "chips", f"{network} a chip", "a step", "tokens/s", "efficiency"],
        f"more {unit} (with ring bytes, hop latency and the slowest of the {unit}; "
        f"{accuracy})",
    )


def _scale_total(total: CollectiveTotal, mesh: Mesh, slices: int) -> CollectiveTotal:
    """Scale the traffic of a collective to another number of slices."""
    if total.network not in FAR:
        return total
    local_size = 1  # members of a group in one slice or node
    if total.network != "DCN":
        spanned_slices = num_slices_along(mesh, total.axes)
        local_size = num_shards(mesh.shape, total.axes) // spanned_slices
    if slices == local_size == 1:
        return replace(total, count=0, sent=0.0)
    old_factor, new_factor = (
        sent_bytes(total.kind, 1, local_size * count)
        for count in (num_slices(mesh.devices.flat), slices)
    )
    network = "NVLink" if slices == 1 else total.network
    return replace(total, network=network, sent=total.sent * new_factor / old_factor)
