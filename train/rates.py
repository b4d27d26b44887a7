"""How fast a device computes, moves and sends: the rates of a timeline."""

from collections.abc import Callable
from dataclasses import dataclass

from train.chips import Chip
from train.groups import Group


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


def stated_rates(chip: Chip) -> Rates:
    """Take the vendor's figures.

    One link of a TPU carries a ring, all those of a GPU do; between slices and nodes
    it is the device's share of the network cards.

    Raises:
        ValueError: if the vendor does not state a figure, also when it is asked for.
    """

    def stated(name: str) -> float:
        value = getattr(chip, name)
        if value is None:
            raise ValueError(f"the vendor of {chip.kind} does not state {name}")
        return value

    def send(group: Group) -> float:
        if group.network == "ICI":
            return stated("link_bandwidth")
        if group.network == "NVLink":
            return stated("link_bandwidth") * stated("links")
        return stated("dcn_bandwidth") / chip.devices

    return Rates(
        flops=chip.flops["bfloat16"] / chip.devices,
        memory=stated("hbm_bandwidth") / chip.devices,
        send=send,
    )
