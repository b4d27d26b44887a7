"""The FLOPs, bytes and collectives of one device in one step, by section of the step.

The costs are read from the compiled program (compiled/step.py) or estimated without a
compiler (estimated/step.py). FLOPs are those of matrix products, two for each
multiply-add. Main-memory bytes are counted for each instruction separately, as if there
were no cache.

The `payload` of a collective is the bytes of the result of a gather, of the array that
is reduced (and scattered), or of one device's input of an all-to-all or a permute.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from train.console import print_table
from train.units import format_bytes, format_flops

COMPILED = "compiled"
ESTIMATED = "estimated"
# Layers wait for the activations that are sent along these mesh axes.
ACTIVATION_AXES = {"pipeline", "tensor", "context", "expert"}


@dataclass(frozen=True)
class Flops:
    """FLOPs of one device in one step.

    products: FLOPs of dots and convolutions.
    attention: FLOPs of attention kernels, without the blocks that they skip.
    whole_attention: FLOPs of attention kernels as if they skipped no block.
    unknown: kernels whose FLOPs are not counted.
    eight_bits: the FLOPs in `products` whose operands have eight bits.
    grouped: the FLOPs in `products` that multiply rows grouped by expert.
    grouped_tiles: the FLOPs of the tiles in which a kernel computes `grouped`. A tile
        that has rows of two experts is computed twice.
    padded: all FLOPs, counting idle rows and columns of the matrix units; 0 if unknown.
    """

    products: float = 0.0
    attention: float = 0.0
    whole_attention: float = 0.0
    unknown: tuple[str, ...] = ()
    eight_bits: float = 0.0
    grouped: float = 0.0
    grouped_tiles: float = 0.0
    padded: float = 0.0

    @property
    def total(self) -> float:
        """All executed FLOPs."""
        return self.products + self.attention

    def __add__(self, other: "Flops") -> "Flops":
        """Return the sum of both FLOPs, and the unknown kernels of both."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        total = Flops(*(one + two for one, two in pairs))
        return dataclasses.replace(total, unknown=tuple(sorted({*total.unknown})))


@dataclass(frozen=True)
class HbmBytes:
    """Bytes to and from main memory.

    products: bytes of instructions that multiply matrices.
    others: bytes of all other instructions.
    """

    products: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.products + self.others

    def __add__(self, other: "HbmBytes") -> "HbmBytes":
        """Return the sum of both bytes."""
        return HbmBytes(self.products + other.products, self.others + other.others)


@dataclass(frozen=True)
class CollectiveTotal:
    """The sum of the collectives of one kind, over one network and set of axes.

    axes: mesh axes along which the members of a group differ.
    network: the slowest network that a group crosses.
    sent: the bytes that each device sends.
    overlapped: the fraction of `sent` that is overlapped with matrix products.
    serves: the part of the model that uses the result, or "" for all parts.
    links: the links of a TPU chip over which a group sends; 0 if this is unknown.
    """

    axes: tuple[str, ...]
    network: str
    kind: str
    count: float
    payload: int
    sent: float
    overlapped: float
    serves: str = ""
    links: int = 0


@dataclass(frozen=True)
class SectionCost:
    """The costs of one section of a step (train/plan/sections.py).

    name: one of SECTIONS, or "step" if the sections are not known.
    """

    name: str
    flops: Flops
    hbm_bytes: HbmBytes
    sent: list[CollectiveTotal]


@dataclass(frozen=True)
class StepCost:
    """The costs of one device in one step.

    model_flops: a device's share of the model's FLOPs (train/core/model_flops.py).
    outside_layers: the collectives outside the layers, split by `serves` too.
    host_bytes: bytes sent to host memory; the same number comes back.
    unread: the parts of the program's text that could not be read.
    how: whether the cost is compiled or estimated.
    """

    model_flops: float
    sections: tuple[SectionCost, ...]
    outside_layers: list[CollectiveTotal]
    host_bytes: int = 0
    unread: tuple[str, ...] = ()
    how: str = COMPILED

    @property
    def flops(self) -> Flops:
        """The executed FLOPs."""
        return sum((section.flops for section in self.sections), Flops())

    @property
    def hbm_bytes(self) -> HbmBytes:
        """The main-memory traffic."""
        return sum((section.hbm_bytes for section in self.sections), HbmBytes())

    @property
    def sent(self) -> list[CollectiveTotal]:
        """The collectives by mesh axes, network and kind."""
        return add_totals(total for section in self.sections for total in section.sent)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain values, under the keys of plan.json."""
        hbm_bytes = self.hbm_bytes
        traffic = {"memory_bytes": hbm_bytes.total, "product_bytes": hbm_bytes.products}
        return dataclasses.asdict(self) | {
            "work": dataclasses.asdict(self.flops) | traffic,
            "sent": list(map(dataclasses.asdict, self.sent)),
            "executed_over_model_flops": self.flops.total / self.model_flops,
        }


def add_totals(totals: Iterable[CollectiveTotal]) -> list[CollectiveTotal]:
    """Add up the totals of the same axes, network, kind, use and links."""
    groups = defaultdict[tuple, list[CollectiveTotal]](list)
    for t in totals:
        groups[t.axes, t.network, t.kind, t.serves, t.links].append(t)
    sums = []
    for group in groups.values():
        sent = sum(t.sent for t in group)
        total = dataclasses.replace(
            group[0],
            count=sum(t.count for t in group),
            payload=sum(t.payload for t in group),
            sent=sent,
            overlapped=sum(t.sent * t.overlapped for t in group) / (sent or 1.0),
        )
        sums.append(total)
    return sorted(sums, key=lambda total: -total.sent)


def sent_bytes(kind: str, payload: float, size: int) -> float:
    """Return the bytes that each device in a ring of `size` devices sends."""
    if kind in ("collective-permute", "collective-broadcast"):
        return payload
    return payload * (size - 1) / size * (2 if kind == "all-reduce" else 1)


def print_cost(cost: StepCost) -> None:
    """Print the FLOPs, bytes and collectives of a step."""
    ratio = cost.flops.total / cost.model_flops
    print(
        f"computes    {format_flops(cost.flops.total)} a device and step, {ratio:.2f} x"
        f" the model's; {format_bytes(cost.hbm_bytes.total)} to and from memory at most"
    )
    if cost.flops.unknown:
        print(f"            without these kernels: {', '.join(cost.flops.unknown)}")
    rows = [
        [
            " ".join(total.axes) or "none",
            total.network,
            total.kind,
            f"{round(total.count):,}",
            format_bytes(total.sent),
            f"{total.overlapped:.0%}",
        ]
        for total in cost.sent
    ]
    headers = ["axes", "network", "kind", "times", "sent", "overlapped"]
    title = "collectives of a step (sent: by each device; overlapped: with products)"
    print_table(rows, headers, title)
    if cost.unread:
        print(f"not read    {len(cost.unread)} lines of the program's text")
