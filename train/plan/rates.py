"""How fast a device computes, moves and sends: the rates of a timeline."""

from collections.abc import Callable
from dataclasses import dataclass

from jax.sharding import Mesh

from train.hardware.achievable import achievable
from train.hardware.chips import Chip
from train.hardware.interconnect import Group, NotStated, bandwidth


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
    """Take what programs get of the vendor's figures, as `roofline.predict` does.

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
