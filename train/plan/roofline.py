"""How long a step takes: what it computes, reads and sends, at the rates of chips.

Each resource gets the time that it is busy: matrix units, main memory, and every
network along every set of mesh axes (a link). From those follows the time of a step:

optimistic: matrix units and memory work at the same time, and collectives beside both,
    but for those that a layer must wait for: activations along tensor, context and
    expert axes that the schedule does not put beside products.
pessimistic: only matrix products hide their own memory traffic, all other instructions
    wait for memory one after the other; no collective hides behind anything but the
    products that it is scheduled beside, one after the other.

The middle of a range is the mean of both times. Rates are the vendors' times what
programs get of them (hardware/chips.py), and for matrix products times what the model's
dims fill of the matrix units. Input, checkpoints and launches of kernels are not in it.

FLOPs, bytes and seconds are of one JAX device and one step.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from model.choices import Activation
from model.config import ModelConfig
from train.hardware.chips import Chip, achievable
from train.hardware.interconnect import Group, NotStated, bandwidth, hops
from train.plan.cost import CollectiveTotal, StepCost

_WAITED_FOR = {"tensor", "context", "expert"}  # axes that carry activations


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

    bandwidth: bytes a second that a device can send.
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
        return f"{' and '.join(self.axes) or 'no axis'} over {self.network}"


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
        """Return the speed of steps of this many seconds (MFU: train/program.py)."""
        rate = self.tokens / step_s
        mfu = self.model_flops / step_s / self.peak
        return Speed(step_s, rate, rate / self.chips, mfu)

    @property
    def middle(self) -> Speed:
        """The one figure, if there must be one."""
        return self.at(self.step_s.middle)

    @property
    def tokens_per_second(self) -> Range:
        """Of all devices."""
        return self._range("tokens_per_second")

    @property
    def tokens_per_second_per_chip(self) -> Range:
        """Of one chip."""
        return self._range("tokens_per_second_per_chip")

    @property
    def mfu(self) -> Range:
        """Model FLOPs utilization (convention: train/program.py)."""
        return self._range("mfu")

    def _range(self, field: str) -> Range:
        slow, fast = self.at(self.step_s.high), self.at(self.step_s.low)
        return Range(getattr(slow, field), getattr(fast, field))

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        ranges = ("tokens_per_second", "tokens_per_second_per_chip", "mfu")
        own = dataclasses.asdict(self)
        own["lanes"] = own.pop("links")  # the key that scripts rely on
        return {
            **own,
            **{name: dataclasses.asdict(self._range(name)) for name in ranges},
            "middle": dataclasses.asdict(self.middle),
        }


@dataclass(frozen=True)
class Rates:
    """What one JAX device does in a second.

    flops: of matrix products.
    memory: bytes from and to main memory.
    send: bytes to a group.
    """

    flops: float
    memory: float
    send: Callable[[Group], float]


def rates_of(mesh: Mesh, chip: Chip) -> Rates:
    """Return what programs get of the vendor's figures.

    Raises:
        NotStated: if the vendor does not state a figure, also when it is asked for.
    """
    part = achievable(mesh.devices.flat[0].platform)
    if chip.hbm_bandwidth is None:
        raise NotStated(f"{chip.kind}: its vendor does not state hbm_bandwidth")
    return Rates(
        flops=part.products * chip.flops["bfloat16"] / chip.devices,
        memory=part.memory * chip.hbm_bandwidth / chip.devices,
        send=lambda group: bandwidth(mesh, group.axes, group.network, chip),
    )


def predict(
    cost: StepCost, mesh: Mesh, chip: Chip, model: ModelConfig, tokens: int
) -> Prediction:
    """Predict the speed of a step.

    Args:
        cost: what one device does in it.
        mesh: its devices, which need not be there.
        chip: of each device.
        model: whose dims fill the matrix units more or less.
        tokens: of a step, all devices together.

    Raises:
        NotStated: if the vendor does not say how fast something is that the step needs.
    """
    rates, flops, moved = rates_of(mesh, chip), cost.flops, cost.hbm_bytes
    fill, attention_fill = matrix_fill(model, mesh.shape["tensor"], chip.matrix_unit)
    filled = flops.products / fill + flops.attention / attention_fill
    products, links = filled / rates.flops, _links(cost.sent, mesh, chip)
    memory, product_memory = moved.total / rates.memory, moved.products / rates.memory
    return Prediction(
        products=products,
        memory=memory,
        product_memory=product_memory,
        links=links,
        fill=flops.total / filled if filled else 1.0,
        recomputed=flops.total / cost.model_flops,
        step_s=_step(products, memory, product_memory, links),
        tokens=tokens,
        devices=mesh.size,
        chips=mesh.size // chip.devices,
        model_flops=cost.model_flops,
        peak=chip.flops["bfloat16"] / chip.devices,
        how=cost.how,
        platform="tpu" if mesh.devices.flat[0].platform == "tpu" else "gpu",
    )


def _step(
    products: float, memory: float, product_memory: float, links: Iterable[Link]
) -> Range:
    free = [link.seconds - link.waited_for for link in links]
    waited_for = sum(link.waited_for for link in links)
    low = max(products, memory, *free, 0.0) + waited_for
    hidden = sum(link.hidden for link in links)
    exposed = sum(link.exposed for link in links)
    high = max(products, product_memory, hidden) + memory - product_memory + exposed
    return Range(low, high)


def _links(sent: Iterable[CollectiveTotal], mesh: Mesh, chip: Chip) -> tuple[Link, ...]:
    groups = defaultdict[tuple[tuple[str, ...], str], list[CollectiveTotal]](list)
    for total in sent:
        groups[total.axes, total.network].append(total)
    links = []
    for (axes, network), totals in groups.items():
        rate = bandwidth(mesh, axes, network, chip)
        far = hops(mesh, axes, network)
        seconds = [
            t.sent * (far if t.kind.endswith("all-to-all") else 1.0) / rate
            for t in totals
        ]
        hidden = sum(s * t.overlapped for s, t in zip(seconds, totals, strict=True))
        exposed = sum(seconds) - hidden
        link = Link(
            axes=axes,
            network=network,
            bandwidth=rate,
            sent=sum(t.sent for t in totals),
            seconds=sum(seconds),
            hidden=hidden,
            waited_for=exposed if _WAITED_FOR & {*axes} else 0.0,
        )
        links.append(link)
    return tuple(sorted(links, key=lambda link: -link.seconds))


def matrix_fill(
    model: ModelConfig, tensor: int, unit: int | None
) -> tuple[float, float]:
    """Return the parts of matrix units that products with weights, and attention, use.

    A dim that is no multiple of a unit's rows or columns leaves some of them idle.

    Args:
        model: with its vocabulary.
        tensor: devices that share a layer.
        unit: rows and columns of a matrix unit; None: small enough for any dim.
    """
    if unit is None:
        return 1.0, 1.0

    def padded(dim: int) -> int:
        return math.ceil(dim / unit) * unit

    D, H = model.embed_dim, model.head_size
    heads, kv = model.num_heads * H // tensor, max(1, model.kv_heads // tensor) * H
    F = model.mlp_size // tensor
    widened = 3 if model.activation is Activation.swiglu else 2
    of_a_layer = [(D, heads)] * 2 + [(D, kv)] * 2 + [(D, F)] * widened
    matrices = of_a_layer * model.num_layers + [(D, (model.vocab_size or 1) // tensor)]
    used = sum(rows * columns for rows, columns in matrices)
    taken = sum(padded(rows) * padded(columns) for rows, columns in matrices)
    return used / taken, H / padded(H)
