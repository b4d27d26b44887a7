"""How long a step takes: what it computes, reads and sends, at the rates of chips.

Each resource gets the time that it is busy: matrix units, main memory, and every
network along every set of mesh axes (a link). From those follows the time of a step.
TPU:

optimistic: matrix units and memory work at the same time, and collectives beside both,
    but for those that a layer must wait for: activations along tensor, context and
    expert axes that the schedule does not put beside products.
pessimistic: only matrix products hide their own memory traffic, all other instructions
    wait for memory one after the other; no collective hides behind anything but the
    products that it is scheduled beside, one after the other.

The middle of a range is the mean of both times. GPU: kernels run one after the other,
as in the pessimistic case; the range is what public runs were off. Between slices or
nodes hosts start each collective once a hop, and all wait for the slowest.

Rates are the vendors' times what programs get of them (hardware/achievable.py), and for
matrix products times what the model's dims allow (rates.py). Input, checkpoints and
launches of kernels are not in it.

FLOPs, bytes and seconds are of one JAX device and one step.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from train.config import Config
from train.hardware.achievable import slowest
from train.hardware.chips import Chip
from train.hardware.interconnect import bandwidth, hops, num_parts, stated
from train.plan.cost import ACTIVATION_AXES, CollectiveTotal, StepCost
from train.plan.rates import Busy, busy

PCIE = "PCIe"  # between a device and its host's memory
FAR = ("DCN", "network")  # networks between slices, or nodes
# Nine of ten public runs lie as far from the middle at most (docs/log.md).
GPU_SPREAD = 0.2


@dataclass(frozen=True)
class Range:
    """A figure between two, which are in order."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The mean."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Link:
    """One network along one set of mesh axes.

    bandwidth: bytes a second that a device can send, averaged over its collectives,
        which may use some of a chip's links only.
    seconds: that its collectives take, if nothing else slows them.
    hidden: seconds of those that are scheduled beside matrix products.
    waited_for: of the others, seconds that no schedule could hide.
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
        """Seconds of collectives that nothing is scheduled beside."""
        return self.seconds - self.hidden

    @property
    def name(self) -> str:
        """For people."""
        axis = "host memory" if self.network == PCIE else "no axis"
        return f"{' and '.join(self.axes) or axis} over {self.network}"


@dataclass(frozen=True)
class Speed:
    """What a step that takes so long gives."""

    step_s: float
    tokens_per_second: float
    tokens_per_second_per_chip: float
    mfu: float


@dataclass(frozen=True)
class Prediction:
    """The speed of a program.

    products: seconds of matrix products, if memory is no obstacle.
    memory: seconds of all memory traffic; product_memory: of those beside products.
    links: networks along mesh axes, the busiest first.
    fill: part of the matrix units that the dims of the products use.
    recomputed: executed FLOPs over the model's.
    step_s: seconds of a step.
    tokens: of a step, all devices together.
    peak: the model's FLOPs in a second at an MFU of 1.
    how: compiled or estimated, what all this was computed from.
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

    def at(self, step_s: float) -> Speed:
        """Return the speed of steps that take so long (MFU: train/model_flops.py)."""
        rate = self.tokens / step_s
        mfu = self.model_flops / step_s / self.peak
        return Speed(step_s, rate, rate / self.chips, mfu)

    @property
    def middle(self) -> Speed:
        """The one figure, if there must be one."""
        return self.at(self.step_s.middle)

    def range(self, field: str) -> Range:
        """Return what a figure of `Speed` lies between."""
        slow, fast = self.at(self.step_s.high), self.at(self.step_s.low)
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
    cost: StepCost, config: Config, mesh: Mesh, chip: Chip, parts: int | None = None
) -> Prediction:
    """Predict the speed of a step.

    Args:
        cost: what one device does in it.
        config: of the step.
        mesh: its devices, which need not be there.
        chip: of each device.
        parts: slices of TPUs, or nodes of GPUs; None: those of the mesh.

    Raises:
        NotStated: if the vendor does not say how fast something is that the step needs.
    """
    num_domains = num_parts(mesh, mesh.axis_names)
    parts = parts or num_domains
    units = busy(cost, config, mesh, chip)
    links = _links(cost.sent, mesh, chip, parts / num_domains)
    if cost.host_bytes:
        links += (_host_link(cost.host_bytes, chip),)
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    step = _step(units, links, on_tpu)
    slow = slowest(parts, chip.achievable.spread)
    return Prediction(
        **dataclasses.asdict(units),
        links=links,
        recomputed=cost.flops.total / cost.model_flops,
        step_s=Range(slow * step.low, slow * step.high),
        tokens=config.data.batch_size * config.data.sequence_length,
        devices=mesh.size,
        chips=mesh.size // chip.devices,
        model_flops=cost.model_flops,
        peak=chip.flops["bfloat16"] / chip.devices,
        how=cost.how,
        platform="tpu" if on_tpu else "gpu",
    )


def _host_link(sent: int, chip: Chip) -> Link:
    """Time what goes to host memory; as much comes back at the same time."""
    rate = stated(chip, "host_bandwidth") / chip.devices
    return Link((), PCIE, rate, sent, sent / rate, hidden=0.0, waited_for=0.0)


def _step(units: Busy, links: Iterable[Link], on_tpu: bool) -> Range:
    """Return the seconds of a step, as this module's docstring has it."""
    products, memory, product_memory = (
        units.products,
        units.memory,
        units.product_memory,
    )
    hidden = sum(link.hidden for link in links)
    exposed = sum(link.exposed for link in links)
    high = max(products, product_memory, hidden) + memory - product_memory + exposed
    if not on_tpu:
        return Range((1 - GPU_SPREAD) * high, (1 + GPU_SPREAD) * high)
    free = [link.seconds - link.waited_for for link in links]
    waited_for = sum(link.waited_for for link in links)
    return Range(max(products, memory, *free, 0.0) + waited_for, high)


def _links(
    sent: Iterable[CollectiveTotal], mesh: Mesh, chip: Chip, more: float
) -> tuple[Link, ...]:
    """Time collectives, over so many times the slices or nodes of the mesh."""
    groups = defaultdict[tuple[tuple[str, ...], str], list[CollectiveTotal]](list)
    for total in sent:
        groups[total.axes, total.network].append(total)
    links = []
    for (axes, network), totals in groups.items():
        parts = num_parts(mesh, axes) * more if network in FAR else 1
        rates = [bandwidth(mesh, axes, network, chip, t.links) for t in totals]
        timed = [
            _timed(total, rate, parts, mesh, chip)
            for total, rate in zip(totals, rates, strict=True)
        ]
        seconds, hidden = (sum(column) for column in zip(*timed, strict=True))
        total_sent = sum(t.sent for t in totals)
        sending = sum(t.sent / rate for t, rate in zip(totals, rates, strict=True))
        waits = ACTIVATION_AXES & {*axes} or network == "DCN"
        link = Link(
            axes=axes,
            network=network,
            bandwidth=total_sent / sending if sending else rates[0],
            sent=total_sent,
            seconds=seconds,
            hidden=hidden,
            waited_for=seconds - hidden if waits else 0.0,
        )
        links.append(link)
    return tuple(sorted(links, key=lambda link: -link.seconds))


def _timed(
    total: CollectiveTotal, rate: float, parts: float, mesh: Mesh, chip: Chip
) -> tuple[float, float]:
    """Return seconds of collectives, and of those what products hide.

    Hosts start what is sent between slices of TPUs, which hides behind nothing.
    """
    part = chip.achievable
    far = hops(mesh, total.axes, total.network)
    seconds = total.sent * (far if total.kind.endswith("all-to-all") else 1.0) / rate
    rounds = total.count * (2 if total.kind == "all-reduce" else 1)
    start = rounds * (part.start_s + part.hop_s * max(0.0, parts - 1))
    if total.network == "ICI":
        return seconds, seconds * total.overlapped
    if total.network == "DCN":
        return seconds + start, seconds * total.overlapped * (1 - part.unhidden)
    seconds += start
    return seconds, seconds * total.overlapped * (1 - part.unhidden)
