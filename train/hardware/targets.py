"""Names of machines: `v5e-256`, `v5p-512x4`, `h100-8x16`, `gb300-72x2`.

TPU names are Google Cloud's: v4, v5p and tpu7x count cores (two a chip), v5e and v6e
count chips, and x4 means four slices. The GPU name h100-8x16 means 16 nodes of 8 GPUs,
and gb300-72x2 means two racks of 72 GPUs, which are joined by NVLink. The rates of
chips are in `train/hardware/chips.py`.
"""

import math
import re
from dataclasses import dataclass

from data.errors import Mistake
from train.errors import ConfigError
from train.hardware.chips import CHIPS, Chip

CPU = "cpu"  # the devices of this machine

_FLAT_SHAPES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_ONE_HOST = _FLAT_SHAPES[:3]  # Larger slices have hosts of four chips.
# Slices smaller than a cube, and chips in a pod. Source: Google Cloud's pages.
_SMALL_SHAPES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_CUBE = 64  # chips, 4 x 4 x 4
_POD_CHIPS = {"v4": 4096, "v5p": 8960, "tpu7x": 9216}
_GPUS_PER_NODE = (1, 2, 4, 8)
GPUS_PER_RACK = (1, 2, *range(4, 73, 4))
_GPUS_PER_TRAY = 4  # A host of a rack has four GPUs.
_TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
RACKS = ("gb200", "gb300")
_GPUS = ("a100", "h100", "h200", "b200", "b300", *RACKS)
GPUS = ", ".join(_GPUS)
FORMS = "cpu, v5e-256, v5p-512x4 (slices), h100-8x16 (GPUs a node x nodes), of " + (
    ", ".join((*_TPUS, *_GPUS))
)


@dataclass(frozen=True)
class Target:
    """A machine.

    family: the key of its chip in CHIPS.
    topology: the number of chips along each dim of a slice, or of GPUs that are joined
        by NVLink in a node or a rack.
    slices: the number of TPU slices, or of GPU nodes or racks.
    """

    name: str
    family: str
    topology: tuple[int, ...]
    slices: int = 1

    @property
    def chip(self) -> Chip:
        """The rates of one chip."""
        return CHIPS[self.family]

    @property
    def platform(self) -> str:
        """The platform: `tpu` or `cuda`."""
        return "tpu" if self.family in _TPUS else "cuda"

    @property
    def num_chips(self) -> int:
        """The number of chips in all slices."""
        return math.prod(self.topology) * self.slices

    @property
    def num_devices(self) -> int:
        """The number of JAX devices in all slices."""
        return self.num_chips * self.chip.devices

    @property
    def host_bounds(self) -> tuple[int, ...]:
        """The number of chips of a host along each dim of a slice."""
        if self.family in RACKS:
            return (min(self.num_chips // self.slices, _GPUS_PER_TRAY),)
        if self.platform == "cuda" or self.topology in _ONE_HOST:
            return self.topology
        return (2, 2, 1)[: len(self.topology)]

    @property
    def chips_per_host(self) -> int:
        """The number of chips of a host."""
        return math.prod(self.host_bounds)

    @property
    def num_hosts(self) -> int:
        """The number of hosts of all slices."""
        return self.num_chips // self.chips_per_host


def parse_target(name: str) -> Target:
    """Return the machine with this name.

    Raises:
        ConfigError: if there is no such machine. The message lists names that exist.
    """
    match = re.fullmatch(r"([a-z]+\d*[a-z]*)-(\d+)(?:x(\d+))?", name)
    if match is None or (family := match[1]) not in (*_TPUS, *_GPUS):
        raise _name_error(name, f"must be one like {FORMS}")
    size = int(match[2])
    slices = int(match[3] or 1)
    if slices < 1:
        unit = "node" if family in _GPUS else "slice"
        raise _name_error(name, f"must have at least one {unit}")
    topologies = _topologies(family)
    if size not in topologies:
        raise _name_error(name, _size_rule(family, size, topologies))
    return Target(name, family, topologies[size], slices)


def _name_error(name: str, rule: str) -> ConfigError:
    return ConfigError([Mistake("target", name, rule)])


def _topologies(family: str) -> dict[int, tuple[int, ...]]:
    """Return a slice's topology for each size that a name may state."""
    if family in _GPUS:
        sizes = GPUS_PER_RACK if family in RACKS else _GPUS_PER_NODE
        return {n: (n,) for n in sizes}
    if family not in _POD_CHIPS:
        return {math.prod(shape): shape for shape in _FLAT_SHAPES}
    cubes = range(_CUBE, _POD_CHIPS[family] + 1, _CUBE)
    shapes = [*_SMALL_SHAPES, *(_compact(chips) for chips in cubes)]
    return {2 * math.prod(shape): shape for shape in shapes}  # sizes count cores


def _compact(chips: int) -> tuple[int, int, int]:
    """Return the most compact box of 4 x 4 x 4 cubes with this number of chips."""
    cubes = chips // _CUBE
    boxes = [
        (a, b, cubes // (a * b))
        for a in range(1, round(cubes ** (1 / 3)) + 1)
        for b in range(a, math.isqrt(cubes // a) + 1)
        if cubes % (a * b) == 0
    ]
    a, b, c = min(boxes, key=sum)
    return 4 * a, 4 * b, 4 * c


def _size_rule(family: str, size: int, topologies: dict[int, tuple[int, ...]]) -> str:
    if family in RACKS:
        rule = (
            f"must be {family}-n or {family}-nxm, m racks of n GPUs that NVLink joins"
        )
        return f"{rule}: 1, 2, 4 or any other multiple of 4 up to 72"
    if family in _GPUS:
        return f"must be {family}-n or {family}-nxm, m nodes of n = 1, 2, 4 or 8 GPUs"
    smaller = [n for n in topologies if n < size][-1:]
    larger = [n for n in topologies if n > size][:1]
    names = " and ".join(f"{family}-{n}" for n in smaller + larger)
    counts = ", ".join(str(n) for n in topologies if n <= 256)
    unit = "chips"
    if family in _POD_CHIPS:
        unit = f"... {max(topologies)} cores (two a chip), from 128 on all multiples"
    return f"{family} comes in {counts} {unit}; the nearest are {names}"
