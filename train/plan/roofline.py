"""Predict the time of a step from its FLOPs, bytes, collectives and the chips' rates.

The resources are the matrix units, main memory, and every network along every set of
mesh axes (a link). The time of a step follows from the busy time of each resource. For
TPUs there are two cases:

optimistic: matrix units, memory and collectives all overlap. Only two kinds of
    collectives add to the time, as far as the schedule does not overlap them with
    products: activations along the pipeline, tensor, context and expert axes, which a
    layer must wait for, and transfers between slices.
pessimistic: only matrix products hide their own memory traffic; all other instructions
    wait for memory one after another. A collective is hidden only by the products that
    the schedule overlaps it with.

The middle of a range is the mean of both times. On GPUs kernels run one after another,
so the middle is the pessimistic time. The range around it is the error seen in public
runs. Each further slice or node adds to the start-up of a collective, and all slices or
nodes wait for the slowest one.

Rates are the vendors' figures times the fraction that programs achieve
(hardware/achievable.py). The model's dims lower the rate of matrix products further
(rates.py). Input, checkpoints and kernel launches are not included.

FLOPs, bytes and seconds refer to one JAX device and one step.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from train.config import Config
from train.hardware.achievable import slowest_ratio
from train.hardware.chips import Chip
from train.hardware.interconnect import bandwidth, hops, num_slices_along, stated
from train.plan.cost import ACTIVATION_AXES, CollectiveTotal, StepCost
from train.plan.rates import BusyTimes, busy_times_of

PCIE = "PCIe"  # between a device and its host's memory
FAR = ("DCN", "network")  # networks between slices, or nodes
# Nine of ten public runs are within this distance of the middle (docs/log/planner.md).
GPU_SPREAD = 0.2


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
class Link:
    """One network along one set of mesh axes.

    bandwidth: bytes a second that a device can send, averaged over the collectives,
        which may use only some of a chip's links.
    sent: the bytes that a device sends in a step.
    seconds: the time of the collectives if nothing else slows them.
    hidden: the part of `seconds` that is overlapped with matrix products.
    waited_for: the part of `seconds` that no schedule could hide.
    """

    axes: tuple[str, ...]
    network: str
    bandwidth: float
    sent: float
    seconds: float
    hidden: float
    waited_for: float

    @property
    def exposed(self) -> float:
        """Seconds of collectives that are not overlapped."""
        return self.seconds - self.hidden

    @property
    def name(self) -> str:
        """The mesh axes and the network, for people."""
        axis = "host memory" if self.network == PCIE else "no axis"
        return f"{' and '.join(self.axes) or axis} over {self.network}"


@dataclass(frozen=True)
class Speed:
    """The speed that follows from the time of a step."""

    step_s: float
    tokens_per_second: float
    tokens_per_second_per_chip: float
    mfu: float


@dataclass(frozen=True)
class Prediction:
    """The speed of a program.

    products: seconds of matrix products, ignoring memory.
    memory: seconds of all memory traffic.
    product_memory: seconds of the memory traffic of products.
    links: networks along mesh axes, the busiest first.
    fill: the fraction of the matrix units that the dims of the products use.
    recomputed: executed FLOPs over model FLOPs.
    step_s: seconds of a step.
    tokens: tokens of a step on all devices.
    peak: a device's model FLOPs per second at an MFU of 1.
    how: whether the cost is compiled or estimated.
    platform: tpu or gpu.
    """

    products: float
    memory: float
    product_memory: float
    links: tuple[Link, ...]
    fill: float
    recomputed: float
    step_s: Range
    tokens: int
    devices: int
    chips: int
    model_flops: float
    peak: float
    how: str
    platform: str

    def speed_at(self, step_s: float) -> Speed:
        """Return the speed if a step takes `step_s` (MFU: train/model_flops.py)."""
        rate = self.tokens / step_s
        mfu = self.model_flops / step_s / self.peak
        return Speed(step_s, rate, rate / self.chips, mfu)

    @property
    def middle(self) -> Speed:
        """The speed at the middle of the range of `step_s`."""
        return self.speed_at(self.step_s.middle)

    def range(self, field: str) -> Range:
        """Return the predicted range of a field of `Speed`."""
        slow, fast = self.speed_at(self.step_s.high), self.speed_at(self.step_s.low)
        return Range(getattr(slow, field), getattr(fast, field))

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        ranges = ("tokens_per_second", "tokens_per_second_per_chip", "mfu")
        values = dataclasses.asdict(self)
        values["lanes"] = values.pop("links")  # the key that scripts rely on
        return {
            **values,
            **{name: dataclasses.asdict(self.range(name)) for name in ranges},
            "middle": dataclasses.asdict(self.middle),
        }


def predict(
    cost: StepCost,
    config: Config,
    mesh: Mesh,
    chip: Chip,
    num_domains: int | None = None,
) -> Prediction:
    """Predict the speed of a step.

    Args:
        cost: the cost of one device in the step.
        config: the config of the step.
        mesh: the devices, which need not be present.
        chip: the chip of each device.
        num_domains: the number of TPU slices or GPU nodes; None means those of `mesh`.

    Raises:
        NotStated: if the vendor does not state a rate that the step needs.
    """
    mesh_domains = num_slices_along(mesh, mesh.axis_names)
    num_domains = num_domains or mesh_domains
    busy_times = busy_times_of(cost, config, mesh, chip)
    links = _time_links(cost.sent, mesh, chip, num_domains / mesh_domains)
    if cost.host_bytes:
        links += (_host_link(cost.host_bytes, chip),)
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    step = _step_seconds(busy_times, links, on_tpu)
    slowdown = slowest_ratio(num_domains, chip.achievable.spread)
    return Prediction(
        **dataclasses.asdict(busy_times),
        links=links,
        recomputed=cost.flops.total / cost.model_flops,
        step_s=Range(slowdown * step.low, slowdown * step.high),
        tokens=config.data.batch_size * config.data.sequence_length,
        devices=mesh.size,
        chips=mesh.size // chip.devices,
        model_flops=cost.model_flops,
        peak=chip.flops["bfloat16"] / chip.devices,
        how=cost.how,
        platform="tpu" if on_tpu else "gpu",
    )


def _host_link(num_bytes: int, chip: Chip) -> Link:
    """Time the transfers to host memory; those from host memory run concurrently."""
    rate = stated(chip, "host_bandwidth") / chip.devices
    return Link((), PCIE, rate, num_bytes, num_bytes / rate, hidden=0.0, waited_for=0.0)


def _step_seconds(busy_times: BusyTimes, links: Iterable[Link], on_tpu: bool) -> Range:
    """Return the seconds of a step, as defined in this module's docstring."""
    products, memory = busy_times.products, busy_times.memory
    product_memory = busy_times.product_memory
    hidden = sum(link.hidden for link in links)
    exposed = sum(link.exposed for link in links)
    pessimistic_s = max(products, product_memory, hidden) + memory - product_memory
    pessimistic_s += exposed
    if not on_tpu:
        return Range((1 - GPU_SPREAD) * pessimistic_s, (1 + GPU_SPREAD) * pessimistic_s)
    overlappable = [link.seconds - link.waited_for for link in links]
    unhideable = sum(link.waited_for for link in links)
    optimistic_s = max(products, memory, *overlappable, 0.0) + unhideable
    return Range(optimistic_s, pessimistic_s)


def _time_links(
    collectives: Iterable[CollectiveTotal], mesh: Mesh, chip: Chip, growth: float
) -> tuple[Link, ...]:
    """Return the links for `growth` times as many slices or nodes as the mesh has."""
    groups = defaultdict[tuple[tuple[str, ...], str], list[CollectiveTotal]](list)
    for total in collectives:
        groups[total.axes, total.network].append(total)
    links = []
    for (axes, network), totals in groups.items():
        num_domains = num_slices_along(mesh, axes) * growth if network in FAR else 1
        rates = [bandwidth(mesh, axes, network, chip, t.links) for t in totals]
        times = [
            _time_collectives(total, rate, num_domains, mesh, chip)
            for total, rate in zip(totals, rates, strict=True)
        ]
        seconds, hidden = (sum(column) for column in zip(*times, strict=True))
        total_sent = sum(t.sent for t in totals)
        sending_s = sum(t.sent / rate for t, rate in zip(totals, rates, strict=True))
        is_unhideable = ACTIVATION_AXES & {*axes} or network == "DCN"
        link = Link(
            axes=axes,
            network=network,
            bandwidth=total_sent / sending_s if sending_s else rates[0],
            sent=total_sent,
            seconds=seconds,
            hidden=hidden,
            waited_for=seconds - hidden if is_unhideable else 0.0,
        )
        links.append(link)
    return tuple(sorted(links, key=lambda link: -link.seconds))


def _time_collectives(
    total: CollectiveTotal, rate: float, num_domains: float, mesh: Mesh, chip: Chip
) -> tuple[float, float]:
    """Return the seconds of collectives, and the seconds that products hide.

    Between TPU slices the hosts start each transfer, and products do not hide this
    start-up.
    """
    achievable = chip.achievable
    num_hops = hops(mesh, total.axes, total.network)
    distance = num_hops if total.kind.endswith("all-to-all") else 1.0
    seconds = total.sent * distance / rate
    rounds = total.count * (2 if total.kind == "all-reduce" else 1)
    round_s = achievable.start_s + achievable.hop_s * max(0.0, num_domains - 1)
    start_s = rounds * round_s
    if total.network == "ICI":
        return seconds, seconds * total.overlapped
    if total.network == "DCN":
        return seconds + start_s, seconds * total.overlapped * (1 - achievable.unhidden)
    seconds += start_s
    return seconds, seconds * total.overlapped * (1 - achievable.unhidden)
