"""Compute how long a device's matrix units, main memory and networks are busy.

On TPUs, idle rows and columns of the matrix units slow products down. On GPUs, the rate
of products grows with the contracted dim, and the rate of attention depends on the head
dim and the row length. Products of rows grouped by expert run at a fraction of the rate
of other products, and no faster than main memory supplies their tiles.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from model.config import ModelConfig
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

    This and `Rates.send` raise NotStated if the vendor does not state a figure.
    """
    bfloat16 = chip.flops["bfloat16"]
    product_rate = chip.achievable.products / chip.devices
    eight_bits = chip.achievable.eight_bits or chip.achievable.products
    eight_bit_rate = eight_bits / chip.devices * chip.flops.get(compute, 0.0)
    memory_rate = chip.achievable.memory * stated(chip, "hbm_bandwidth") / chip.devices
    return Rates(
        flops=product_rate * bfloat16,
        memory=memory_rate,
        send=lambda g: bandwidth(mesh, g.axes, g.network, chip, g.links),
        eight_bits=max(product_rate * bfloat16, eight_bit_rate),
    )


@dataclass(frozen=True)
class Link:
    """One network along one set of mesh axes.

    bandwidth: bytes a second that a device sends while its collectives run.
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
    model: ModelConfig,
    *,
    sequence_length: int,
    mesh: Mesh,
    chip: Chip,
    growth: float,
) -> BusyTimes:
    """Return how long a device computes, reads, writes and sends.

    The times are those of `growth` times as many slices or nodes as the mesh has.
    Raises NotStated if the vendor does not state a figure.
    """
    rates = rates_of(mesh, chip, model.compute_dtype)
    flops = cost.flops
    hbm_bytes = cost.hbm_bytes
    saved_s = flops.eight_bits * (1 / rates.flops - 1 / rates.eight_bits)
    padded = flops.padded or flops.total
    fill = flops.total / padded if padded else 1.0
    # On GPUs, the time lost in short contractions does not depend on the dtype.
    products_s = padded / rates.flops - saved_s / (fill if chip.matrix_unit else 1.0)
    if attention := chip.achievable.attention:
        fraction = attention.fraction(model.head_size, sequence_length)
        attention_s = flops.attention * chip.devices / chip.flops["bfloat16"] / fraction
        products_s += attention_s - flops.attention / rates.flops
    grouped = chip.achievable.grouped
    tile_rate = grouped.intensity * rates.memory
    slowdown = max(1 / grouped.rate, rates.flops / tile_rate)
    products_s += (slowdown - 1) * flops.grouped_tiles / rates.flops
    groups = defaultdict[tuple[tuple[str, ...], str], list[CollectiveTotal]](list)
    for total in cost.sent:
        groups[total.axes, total.network].append(total)
    links = (_time_link(totals, mesh, chip, growth) for totals in groups.values())
    return BusyTimes(
        products_s,
        memory=hbm_bytes.total / rates.memory,
        product_memory=hbm_bytes.products / rates.memory,
        links=tuple(sorted(links, key=lambda link: -link.seconds)),
        fill=fill,
    )


def host_link(num_bytes: int, chip: Chip) -> Link:
    """Time the transfers to host memory; those from host memory run concurrently."""
    rate = stated(chip, "host_bandwidth") / chip.devices
    return Link((), PCIE, rate, num_bytes, num_bytes / rate, hidden=0.0, waited_for=0.0)


def _time_link(
    totals: Sequence[CollectiveTotal], mesh: Mesh, chip: Chip, growth: float
) -> Link:
    """Time the collectives of one network and set of axes."""
    axes = totals[0].axes
    network = totals[0].network
    achievable = chip.achievable
    num_domains = num_slices_along(mesh, axes) * growth if network in FAR else 1
    round_s = achievable.start_s + achievable.hop_s * max(0.0, num_domains - 1)
    has_dcn = network == "DCN"
    seconds = 0.0
    hidden = 0.0
    for total in totals:
        rate = bandwidth(mesh, axes, network, chip, total.links)
        distance = hops(mesh, axes, network) if total.kind.endswith("all-to-all") else 1
        sending_s = total.sent * distance / rate
        start_s = round_s * total.count * (2 if total.kind == "all-reduce" else 1)
        seconds += sending_s + start_s
        # The hosts of TPUs start each transfer over DCN, and products do not hide this.
        sending_part = (1 - achievable.unhidden) * sending_s
        hideable_s = sending_part if has_dcn else sending_s + start_s
        hidden += total.overlapped * hideable_s
    sent = sum(total.sent for total in totals)
    cannot_hide = has_dcn or ACTIVATION_AXES & {*axes}
    return Link(
        axes=axes,
        network=network,
        bandwidth=sent / seconds if seconds else 0.0,
        sent=sent,
        seconds=seconds,
        hidden=hidden,
        waited_for=seconds - hidden if cannot_hide else 0.0,
    )
