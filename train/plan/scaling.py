"""Weak scaling: predict the speed of more slices with the same rows on each.

Three costs grow with the number n of slices: the factor (n-1)/n of ring traffic, the
start-up of each hop, and the delay of the slowest slice. Between TPU slices a ring has
one chip of each slice. A ring of GPUs has all GPUs of its group on all nodes, and uses
NVLink if there is only one node.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from data.config import DataConfig
from model.config import ModelConfig
from train.console import print_table
from train.core.shards import num_shards
from train.hardware.chips import Chip
from train.hardware.interconnect import num_slices, num_slices_along
from train.plan.cost import CollectiveTotal, StepCost, sent_bytes
from train.plan.rates import FAR
from train.plan.roofline import Prediction, Range, predict
from train.units import format_count

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
    model: ModelConfig,
    data: DataConfig,
    *,
    mesh: Mesh,
    chip: Chip,
    slice_counts: Iterable[int] = SLICE_COUNTS,
) -> list[ScalingPoint]:
    """Predict the speed of a program on other numbers of slices.

    The other arguments and errors are those of `predict`. The result is empty for a
    program on one slice, or with pipeline stages across slices, because more stages
    need more layers.
    """
    if num_slices(mesh.devices.flat) < 2 or num_slices_along(mesh, ["pipeline"]) > 1:
        return []

    def predict_for(slices: int) -> Prediction:
        sections = (
            replace(s, sent=[_scale_total(total, mesh, slices) for total in s.sent])
            for s in cost.sections
        )
        scaled = replace(cost, sections=tuple(sections))
        return predict(scaled, model, data, mesh=mesh, chip=chip, num_domains=slices)

    single_s = predict_for(1).bounds
    points = []
    for slices in slice_counts:
        prediction = predict_for(slices)
        step_s = prediction.bounds
        low, high = sorted((single_s.low / step_s.low, single_s.high / step_s.high))
        sent = sum(link.sent for link in prediction.links if link.network in FAR)
        points.append(
            ScalingPoint(slices, sent * chip.devices, prediction, Range(low, high))
        )
    return points


def print_weak_scaling(points: Sequence[ScalingPoint]) -> None:
    """Print a table with one row for each number of slices or nodes."""
    unit = "slices" if points[0].prediction.platform == "tpu" else "nodes"
    rows = [
        [
            f"{point.slices:,}",
            f"{point.prediction.chips:,}",
            format_count(point.prediction.middle.tokens_per_second),
            f"{point.efficiency.low:.1%} to {point.efficiency.high:.1%}",
        ]
        for point in points
    ]
    headers = [unit, "chips", "tokens/s", "efficiency"]
    print_table(rows, headers, f"more {unit}, with the same rows on each")


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
    old_size = local_size * num_slices(mesh.devices.flat)
    new_size = local_size * slices
    growth = sent_bytes(total.kind, 1, new_size) / sent_bytes(total.kind, 1, old_size)
    network = "NVLink" if slices == 1 else total.network
    return replace(total, network=network, sent=total.sent * growth)
