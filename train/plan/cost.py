"""What one device computes, moves and sends in one step.

Known in two ways: read in the text of the compiled program (compiled/step.py), or
estimated without a compiler (estimated/step.py). Both count alike.

FLOPs are those of matrix products alone, two for each multiplication and addition.
Bytes of main memory are what each instruction reads and writes by itself, as if no
cache held anything from one to the next.

Of collectives, n being the size of a group: `payload` is the bytes of the whole
gathered array, of the array that is reduced (and scattered), of what one device gives
to an all-to-all or a permute. `sent` is the bytes that each device puts on its links
when rings are used: (n-1)/n of the payload, twice that for an all-reduce, all of it for
a permute.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from train.console import print_table
from train.units import format_bytes, format_flops

COMPILED, ESTIMATED = "compiled", "estimated"
# Those that carry activations, which layers wait for.
ACTIVATION_AXES = {"pipeline", "tensor", "context", "expert"}
# How many products over [T, S] an attention kernel computes. Splash: the backward pass
# is two kernels, each of which makes the scores and their cotangent again. cuDNN: two
# of the forward pass; scores again and the four gradients.
SPLASH_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
CUDNN_PRODUCTS = {False: 2, True: 5}  # by whether it is the backward pass
_TAKEN = re.compile(r"taken\.(\d+)\.(\d+)")


@dataclass(frozen=True)
class Flops:
    """FLOPs of one device in one step.

    products: of dots and convolutions.
    attention: of attention kernels; blocks that causality skips are not counted.
    whole_attention: as if they skipped none.
    unknown: kernels whose FLOPs are not counted.
    eight_bits: the part of products whose operands have eight bits.
    grouped: the part of products that multiply rows grouped by expert.
    """

    products: float
    attention: float = 0.0
    whole_attention: float = 0.0
    unknown: tuple[str, ...] = ()
    eight_bits: float = 0.0
    grouped: float = 0.0

    @property
    def total(self) -> float:
        """All that are executed."""
        return self.products + self.attention


def expected_part(scope: str) -> float:
    """Return the part of an array's rows that is in use, by model/scopes.py's scope."""
    numbers = re.findall(r"expected\.(\d+)\.(\d+)", scope)
    return int(numbers[-1][0]) / int(numbers[-1][1]) if numbers else 1.0


def computed_blocks(scope: str) -> tuple[int, int] | None:
    """Return how many blocks of scores a kernel computes, and of how many.

    By model/scopes.py's scope; None: none says so.
    """
    numbers = re.findall(r"computed\.(\d+)\.(\d+)", scope)
    return (int(numbers[-1][0]), int(numbers[-1][1])) if numbers else None


def taken_part(scopes: Iterable[str], outside: str = "") -> Fraction | None:
    """Return how often a branch is taken by the scopes inside; None: none says so.

    Args:
        scopes: of what is in the branch.
        outside: of the conditional, which may be in a branch itself.
    """
    around = len(_TAKEN.findall(outside))
    matches = [
        scopes_found[around]
        for scopes_found in map(_TAKEN.findall, scopes)
        if len(scopes_found) > around
    ]
    return Fraction(int(matches[0][0]), int(matches[0][1])) if matches else None


def causal_blocks(grid: Sequence[int]) -> tuple[int, int]:
    """Return how many blocks of scores a causal kernel computes, and of how many.

    Args:
        grid: of its mask: [n, w] or [w, n], n blocks of a row's queries (or keys), and
            w as many as a window reaches over.
    """
    w, n = sorted(grid)
    return sum(min(i + 1, w) for i in range(n)), n * n


@dataclass(frozen=True)
class HbmBytes:
    """Bytes to and from main memory.

    products: of instructions that multiply matrices, perhaps meanwhile.
    others: of all other instructions.
    """

    products: int
    others: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.products + self.others


@dataclass(frozen=True)
class CollectiveTotal:
    """The sum of some collectives of a step.

    axes: mesh axes along which the members of a group differ.
    network: the slowest that a group crosses.
    sent: bytes, by each device.
    overlapped: the part of `sent` that is scheduled beside matrix products.
    serves: the part of the model it belongs to, where totals are itemized by that.
    links: of a chip, over which its groups send within a slice of TPUs; 0: not known.
    """

    axes: tuple[str, ...]
    network: str
    kind: str
    count: int
    payload: int
    sent: float
    overlapped: float
    serves: str = ""
    links: int = 0


@dataclass(frozen=True)
class StepCost:
    """What one device does in one step.

    model_flops: what the model needs of a device (convention: train/model_flops.py).
    flops: what is executed.
    sent: collectives by mesh axes, network and kind.
    outside_layers: those that no layer does, by what they serve.
    host_bytes: that travel to host memory, and as many back.
    unread: instructions that the reader of the program's text does not know.
    how: compiled or estimated.
    """

    model_flops: float
    flops: Flops
    hbm_bytes: HbmBytes
    sent: list[CollectiveTotal]
    outside_layers: list[CollectiveTotal]
    host_bytes: int = 0
    unread: tuple[str, ...] = ()
    how: str = COMPILED

    def as_json(self) -> dict[str, Any]:
        """Return all figures as plain values, under the keys of plan.json."""
        flops, hbm_bytes = self.flops, self.hbm_bytes
        values = dataclasses.asdict(self)
        del values["flops"], values["hbm_bytes"]
        counted = dataclasses.asdict(flops)
        hbm_bytes = {
            "memory_bytes": hbm_bytes.total,
            "product_bytes": hbm_bytes.products,
        }
        ratio = flops.total / self.model_flops
        return values | {
            "work": counted | hbm_bytes,
            "executed_over_model_flops": ratio,
        }


def sent_bytes(kind: str, payload: float, size: int) -> float:
    """Return the bytes that each device of a ring of `size` sends."""
    if kind in ("collective-permute", "collective-broadcast"):
        return payload
    return payload * (size - 1) / size * (2 if kind == "all-reduce" else 1)


def print_cost(cost: StepCost) -> None:
    """Print what a step computes, then what it sends, and what for."""
    ratio = cost.flops.total / cost.model_flops
    print(
        f"computes    {format_flops(cost.flops.total)} a device and step, {ratio:.2f} x"
        f" the model's; {format_bytes(cost.hbm_bytes.total)} to and from memory at most"
    )
    if cost.flops.unknown:
        print(f"            without these kernels: {', '.join(cost.flops.unknown)}")
    headers = ["axes", "network", "links", "kind", "times", "payload", "sent"]
    headers.append("overlapped")
    print_table(
        [cells(total) for total in cost.sent],
        headers,
        "collectives of a step (links: of a chip, that its groups span; sent: by each "
        "device, in rings; overlapped: beside products)",
    )
    print_table(
        [[*cells(total), total.serves] for total in cost.outside_layers],
        [*headers, "for"],
        "of these outside the layers",
    )
    if cost.unread:
        print(f"not read    {len(cost.unread)} lines of the program's text")


def cells(total: CollectiveTotal) -> list[str]:
    """Return axes, network, links, kind, times, payload, sent, overlapped as text."""
    return [
        " ".join(total.axes) or "none",
        total.network,
        str(total.links or "") if total.network == "ICI" else "",
        total.kind,
        f"{total.count:,}",
        format_bytes(total.payload),
        format_bytes(total.sent),
        f"{total.overlapped:.0%}",
    ]
