"""Compute how long a device's matrix units, main memory and networks are busy.

On TPUs, products run at the achievable fraction of the peak times the fraction of the
matrix units that the model's dims fill. On GPUs, the rate of products grows with the
contracted dim, and the rate of attention depends on the head dim and the row length.
Products of rows grouped by expert run at a fraction of the rate of other products, and
no faster than main memory supplies their tiles. Each further slice or node adds to the
start-up of a collective.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jax.sharding import Mesh

from train.config import Config
from train.hardware.chips import Chip
from train.hardware.interconnect import Group, bandwidth, hops, num_slices_along, stated
from train.plan.cost import ACTIVATION_AXES, CollectiveTotal, SectionCost, StepCost

PCIE = "PCIe"  # between a device and its host's memory
FAR = ("DCN", "network")  # networks between slices, or nodes


@dataclass(frozen=True)
class Rates:
    """The achievable rates of one JAX device, per second.

    flops: FLOPs of matrix products that fill the units.
    memory: bytes to and from main memory.
    send: returns the bytes that the device can send to a group.
    eight_bits: FLOPs of matrix products whose operands have eight bits.
    """

    flops: float
    memory: float
    send: Callable[[Group], float]
    eight_bits: float


def rates_of(mesh: Mesh, chip: Chip, compute: str = "auto") -> Rates:
    """Return the achievable rates of a chip; `compute` is `model.compute_dtype`.

    Raises:
        NotStated: if the vendor does not state a figure. `Rates.send` raises it too.
    """
    achievable, bfloat16 = chip.achievable, chip.flops["bfloat16"]
    return Rates(
        flops=achievable.products * bfloat16 / chip.devices,
        memory=achievable.memory * stated(chip, "hbm_bandwidth") / chip.devices,
        send=lambda group: bandwidth(
            mesh, group.axes, group.network, chip, group.links
        ),
        eight_bits=(
            achievable.products * chip.flops.get(compute, bfloat16) / chip.devices
        ),
    )


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
class BusyTimes:
    """The busy times of a device's resources in a step or in one section of it.

    products: seconds of matrix products, ignoring memory.
    memory: seconds of all memory traffic.
    product_memory: seconds of the memory traffic of products.
    links: networks along mesh axes, the busiest first.
    fill: the fraction of the matrix units that the dims of the products use.
    """

    products: float
    memory: float
    product_memory: float
    links: tuple[Link, ...]
    fill: float


def busy_times_of(
    cost: StepCost | SectionCost,
    config: Config,
    mesh: Mesh,
    chip: Chip,
    growth: float = 1.0,
) -> BusyTimes:
    """Return how long a device computes, reads, writes and sends.

    The times are those of `growth` times as many slices or nodes as the mesh has.

    Raises:
        NotStated: if the vendor does not state a figure.
    """
    model, length = config.model, config.data.sequence_length
    rates = rates_of(mesh, chip, model.compute_dtype)
    flops, hbm_bytes = cost.flops, cost.hbm_bytes
    saved_s = flops.eight_bits * (1 / rates.flops - 1 / rates.eight_bits)
    padded = flops.padded or flops.total
    fill = flops.total / padded if padded else 1.0
    # On GPUs, the time lost in short contractions does not depend on the dtype.
    products_s = padded / rates.flops - saved_s / (fill if chip.matrix_unit else 1.0)
    if attention_rates := chip.achievable.attention:
        fraction = attention_rates.fraction(model.head_size, length)
        attention_s = flops.attention * chip.devices / chip.flops["bfloat16"] / fraction
        products_s += attention_s - flops.attention / rates.flops
    grouped = chip.achievable.grouped
    tile_rate = grouped.intensity * rates.memory
    slowdown = max(1 / grouped.rate, rates.flops * fill / tile_rate)
    products_s += (slowdown - 1) * flops.grouped / fill / rates.flops
    return BusyTimes(
        products_s,
        memory=hbm_bytes.total / rates.memory,
        product_memory=hbm_bytes.products / rates.memory,
        links=_time_links(cost.sent, mesh, chip, growth),
        fill=fill,
    )


def host_link(num_bytes: int, chip: Chip) -> Link:
    """Time the transfers to host memory; those from host memory run concurrently."""
    rate = stated(chip, "host_bandwidth") / chip.devices
    return Link((), PCIE, rate, num_bytes, num_bytes / rate, hidden=0.0, waited_for=0.0)


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
    hideable_s = seconds if total.network == "DCN" else seconds + start_s
    hidden_s = hideable_s * total.overlapped * (1 - achievable.unhidden)
    return seconds + start_s, hidden_s
