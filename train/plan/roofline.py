"""Predict the time of a step from its FLOPs, bytes, collectives and the chips' rates.

The sections of a step run one after another (sections.py), so their times add up. The
time of a section follows from the busy times of the matrix units, main memory, and
every network along every set of mesh axes (a link). For TPUs there are two cases:

optimistic: matrix units, memory and collectives all overlap. Only two kinds of
    collectives add to the time, as far as the schedule does not overlap them with
    products: activations, which a layer must wait for, and transfers between slices.
pessimistic: only matrix products hide their own memory traffic. A collective is hidden
    only by the products that the schedule overlaps it with.

Transfers to host memory overlap with all sections. The predicted time is the mean of
both times. On GPUs, and in steps with experts, kernels run one after another, so it is
the pessimistic time. The bounds around it are GPU_SPREAD. They are WIDE_SPREAD if the
step has experts or products in eight bits, or if a step for TPUs with tensor
parallelism is not compiled. The printed range also includes every published run that
judges the predictions for the chip. All slices or nodes wait for the slowest one.
Input, checkpoints and kernel launches are not included.

FLOPs, bytes and seconds refer to one JAX device and one step.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.sharding import Mesh

from data.config import DataConfig
from model.config import ModelConfig
from train.hardware.achievable import slowest_ratio
from train.hardware.chips import Chip
from train.hardware.interconnect import num_slices_along
from train.plan.cost import ESTIMATED, StepCost
from train.plan.rates import BusyTimes, busy_times_of, host_link

PRODUCTS = "matrix products"
MEMORY = "main memory"
GPU_SPREAD = 0.2  # from the predicted time to either bound (docs/results.md)
WIDE_SPREAD = 0.3  # the same where few public runs judge a prediction


@dataclass(frozen=True)
class Range:
    """The bounds of a figure: low <= high."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The mean."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Speed:
    """The speed that follows from the time of a step."""

    step_s: float
    tokens_per_second: float
    tokens_per_second_per_chip: float
    mfu: float


@dataclass(frozen=True)
class SectionTime(BusyTimes):
    """The time of one section of a step.

    seconds: the optimistic and the pessimistic time.
    bound_by: the busiest resource: PRODUCTS, MEMORY, or the name of a link.
    """

    name: str
    seconds: Range
    bound_by: str


@dataclass(frozen=True)
class Prediction(BusyTimes):
    """The speed of a program, and its busy times.

    sections: the times of the sections, which run one after another.
    recomputed: executed FLOPs over model FLOPs.
    bounds: the optimistic and the pessimistic time of a step.
    tokens: tokens of a step on all devices.
    peak: a device's model FLOPs per second at an MFU of 1.
    how: whether the cost is compiled or estimated.
    platform: tpu or gpu.
    judged: the chip's (train/hardware/chips.py).
    """

    sections: tuple[SectionTime, ...]
    recomputed: float
    bounds: Range
    tokens: int
    devices: int
    chips: int
    model_flops: float
    peak: float
    how: str
    platform: str
    judged: tuple[float, float] | None

    @property
    def step_s(self) -> Range:
        """The range of a step's time: the bounds, and what was judged."""
        middle_s = self.bounds.middle
        judged_s = [middle_s * ratio for ratio in self.judged or ()]
        low_s = min([self.bounds.low, *judged_s])
        return Range(low_s, max([self.bounds.high, *judged_s]))

    def speed_at(self, step_s: float) -> Speed:
        """Return the speed if a step takes `step_s` (MFU: `model_flops.py`)."""
        rate = self.tokens / step_s
        mfu = self.model_flops / step_s / self.peak
        return Speed(step_s, rate, rate / self.chips, mfu)

    @property
    def middle(self) -> Speed:
        """The predicted speed, at the middle of the bounds."""
        return self.speed_at(self.bounds.middle)

    def range(self, field: str) -> Range:
        """Return the predicted range of a field of `Speed`."""
        slow = self.speed_at(self.step_s.high)
        fast = self.speed_at(self.step_s.low)
        return Range(getattr(slow, field), getattr(fast, field))

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain values, under the keys of plan.json."""
        values = dataclasses.asdict(self) | {"middle": dataclasses.asdict(self.middle)}
        values["lanes"] = values.pop("links")
        values["step_s"] = dataclasses.asdict(self.step_s)
        for name in ("tokens_per_second", "tokens_per_second_per_chip", "mfu"):
            values[name] = dataclasses.asdict(self.range(name))
        return values


def predict(
    cost: StepCost,
    model: ModelConfig,
    data: DataConfig,
    *,
    mesh: Mesh,
    chip: Chip,
    num_domains: int = 0,
) -> Prediction:
    """Predict the speed of a step on devices that need not be present.

    `num_domains` is the number of TPU slices or GPU nodes, each with the same number of
    rows; 0 means those of `mesh`. Raises NotStated if a rate is not known.
    """
    mesh_domains = num_slices_along(mesh, mesh.axis_names)
    num_domains = num_domains or mesh_domains
    growth = num_domains / mesh_domains
    times = partial(
        busy_times_of,
        model=model,
        sequence_length=data.sequence_length,
        mesh=mesh,
        chip=chip,
        growth=growth,
    )
    sections = [time_section(section.name, times(section)) for section in cost.sections]
    low = sum(section.seconds.low for section in sections)
    high = sum(section.seconds.high for section in sections)
    busy = times(cost)
    waited_s = sum(link.waited_for for link in busy.links)
    if cost.host_bytes:
        link = host_link(cost.host_bytes, chip)
        low, high = (max(s, link.seconds + waited_s) for s in (low, high))
        busy = dataclasses.replace(busy, links=(*busy.links, link))
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    has_experts = cost.flops.grouped > 0
    # Without a schedule, the overlap of permutes with products is uncertain.
    sends_activations = any("tensor" in total.axes for total in cost.sent)
    is_rough = on_tpu and cost.how == ESTIMATED and sends_activations
    is_uncertain = has_experts or is_rough or cost.flops.eight_bits > 0
    is_serial = has_experts or not on_tpu
    if is_uncertain or is_serial:
        middle = high if is_serial else (low + high) / 2
        spread = WIDE_SPREAD if is_uncertain else GPU_SPREAD
        low = (1 - spread) * middle
        high = (1 + spread) * middle
    slowdown = slowest_ratio(num_domains, chip.achievable.spread)
    return Prediction(
        **vars(busy),
        sections=tuple(sections),
        recomputed=cost.flops.total / cost.model_flops,
        bounds=Range(slowdown * low, slowdown * high),
        tokens=round(data.batch_size * data.sequence_length * growth),
        devices=round(mesh.size * growth),
        chips=round(mesh.size * growth / chip.devices),
        model_flops=cost.model_flops,
        peak=chip.flops["bfloat16"] / chip.devices,
        how=cost.how,
        platform="tpu" if on_tpu else "gpu",
        judged=chip.judged,
    )


def time_section(name: str, busy: BusyTimes) -> SectionTime:
    """Return the time of a section, as defined in this module's docstring."""
    overlappable = (link.seconds - link.waited_for for link in busy.links)
    optimistic_s = max(busy.products, busy.memory, *overlappable)
    optimistic_s += sum(link.waited_for for link in busy.links)
    hidden = sum(link.hidden for link in busy.links)
    waits_s = busy.memory - busy.product_memory + sum(x.exposed for x in busy.links)
    pessimistic_s = max(busy.products, busy.product_memory, hidden) + waits_s
    resources = {PRODUCTS: busy.products, MEMORY: busy.memory}
    resources |= {link.name: link.seconds for link in busy.links}
    bound_by = max(resources, key=resources.__getitem__)
    seconds = Range(optimistic_s, pessimistic_s)
    return SectionTime(**vars(busy), name=name, seconds=seconds, bound_by=bound_by)
