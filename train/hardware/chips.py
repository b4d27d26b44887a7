"""The rates of chips, as their vendors state them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from train.hardware.achievable import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    TPU,
    TPU_V6E,
    Achievable,
)

GB = 10**9
GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One chip. Rates are in FLOP/s and bytes/s. None means that no figure is stated.

    kind: a substring of the `device_kind` of the chip's JAX devices.
    flops: dense FLOP/s by operand dtype, for the dtypes that the vendor states.
    devices: the number of JAX devices of a chip.
    link_bandwidth: the bandwidth of one link (ICI, NVLink) in one direction.
    dcn_bandwidth: the chip's share of the host's network cards in one direction.
    host_bandwidth: the bandwidth to the host's memory in one direction.
    program_bytes: the HBM of one JAX device that a program may use under XLA:TPU.
    matrix_unit: the rows and columns of a matrix unit (TPU); smaller dims waste it.
    sparse_cores: whether the TPU has SparseCores that are known to hide collectives.
    scatters_in_one_step: whether XLA:TPU runs a reduce-scatter over a whole slice as
        one ring through all devices, not as an all-reduce.
    hidden: the fractions of collectives in layers that XLA:TPU overlaps with products,
        by kind, within a slice, as read from compiled steps (docs/log/compiled.md).
    max_ragged_devices: the largest slice, in JAX devices, for which XLA:TPU compiles a
        ragged all-to-all (libtpu 0.0.51); None if every slice is possible.
    achievable: the fractions of these rates that programs achieve.
    judged: the lowest and the highest published over predicted time of a step, among
        the runs that judge the predictions for this chip (docs/results.md): of compiled
        steps on TPUs, of estimated ones on GPUs. None if there is no such run.
    """

    kind: str
    flops: Mapping[str, float]
    devices: int = 1
    hbm_bytes: int | None = None
    hbm_bandwidth: float | None = None
    links: int | None = None
    link_bandwidth: float | None = None
    dcn_bandwidth: float | None = None
    host_bandwidth: float | None = None
    program_bytes: int | None = None
    matrix_unit: int | None = None
    sparse_cores: bool = False
    scatters_in_one_step: bool = False
    hidden: Mapping[str, float] = field(default_factory=dict)
    max_ragged_devices: int | None = None
    achievable: Achievable = TPU
    judged: tuple[float, float] | None = None

    def is_faster_in(self, dtype: str) -> bool:
        """Return whether products of this dtype are faster than bfloat16's."""
        return self.flops.get(dtype, 0.0) > self.flops["bfloat16"]


def _flops(
    bfloat16: float, float8: float | None = None, int8: float | None = None
) -> dict[str, float]:
    rates = {"bfloat16": bfloat16, "float8": float8, "int8": int8}
    return {dtype: rate * 1e12 for dtype, rate in rates.items() if rate is not None}


# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. These pages state a
# chip's ICI bandwidth for both directions and all links together (v5e 400 GB/s, v6e
# 800, v5p and tpu7x 1200). They state the DCN bandwidth of one chip, but for v5e that
# of a pod of 256 chips (6.4 Tb/s), and for v4 none. FP8 and DCN of v5p and v6e are from
# tpu7x's page. int8 is stated only for v5e, v5p and v6e. It is left out for GPUs,
# because this project compiled no int8 program for a GPU. v4's links: arXiv:2304.01433.
# matrix_unit: v6e's page, and for other TPUs jax/_src/pallas/mosaic/tpu_info.py in jax.
# program_bytes: "available HBM" in the out-of-memory errors of libtpu 0.0.52.
# GPUs (SXM): NVIDIA's numbers as quoted by stas00/ml-engineering, torchtitan and
# MLPerf's system files, not from NVIDIA's datasheets. FLOP/s with sparsity are halved.
# A100: 312 TFLOP/s, 2039 GB/s, NVLink 3, 600 GB/s both ways over 12 links. H100, H200:
# 1979 (FP8 3958) with sparsity, 3.35 and 4.8 TB/s, NVLink 4, 900 GB/s over 18. B200:
# 2250 (FP8 4500) dense, 8 TB/s, NVLink 5, 1800 GB/s over 18. GB200, GB300: 2500 (5000)
# dense; B300: 2250 (4500). NVIDIA's pages of GB200 NVL72, GB300 NVL72 and DGX B300: a
# rack of 72 GPUs has 130 TB/s of NVLink; a CPU is joined to two GPUs by 900 GB/s both
# ways; GB300 and B300 have network cards of 800 Gb/s. Each other GPU has one card of
# 400 Gb/s (A100: 200), as in DGX systems. hbm_bytes: as CUDA reports it, from
# openxla/xla, xla/backends/gpu/target_config/specs. host_bandwidth: v4's 16 GB/s each
# way, and v6e's 15, come from jax-ml.github.io/scaling-book, "How to Think About TPUs".
# No source states v5e's, v5p's and tpu7x's, so their JAX devices use v4's. GPUs: PCIe 4
# (A100) and 5 with 16 lanes, 64 and 128 GB/s both ways, as NVIDIA states them.
_H100 = Chip(
    "H100",
    _flops(989.5, 1979),
    hbm_bytes=84_929_347_584,
    hbm_bandwidth=3350 * GB,
    links=18,
    link_bandwidth=25 * GB,
    dcn_bandwidth=400 / 8 * GB,
    host_bandwidth=64 * GB,
    achievable=HOPPER,
    judged=(0.65, 1.19),
)
_GB200 = replace(
    _H100,
    kind="GB200",
    flops=_flops(2500, 5000),
    hbm_bytes=197_897_748_480,
    hbm_bandwidth=8000 * GB,
    link_bandwidth=50 * GB,
    host_bandwidth=225 * GB,
    achievable=BLACKWELL,
    judged=None,
)
CHIPS = {
    "v2": Chip("TPU v2", _flops(46), devices=2, matrix_unit=128),
    "v3": Chip("TPU v3", _flops(123), devices=2, matrix_unit=128),
    "v4": Chip(
        "TPU v4",
        _flops(275),
        hbm_bytes=32 * GIB,
        hbm_bandwidth=1200 * GB,
        links=6,
        link_bandwidth=50 * GB,
        host_bandwidth=16 * GB,
        program_bytes=int(30.75 * GIB),
        matrix_unit=128,
        judged=(1.0, 1.20),
    ),
    "v5e": Chip(
        "TPU v5 lite",
        _flops(197, int8=393),
        hbm_bytes=16 * GIB,
        hbm_bandwidth=819 * GB,
        links=4,
        link_bandwidth=50 * GB,
        dcn_bandwidth=6400 / 256 / 8 * GB,
        host_bandwidth=16 * GB,
        program_bytes=int(15.75 * GIB),
        matrix_unit=128,
        hidden={"all-gather": 0.95},
        max_ragged_devices=16,
        judged=(0.87, 1.08),
    ),
    "v5p": Chip(
        "TPU v5",  # some versions of JAX say "TPU v5p"
        _flops(459, 459, int8=918),
        hbm_bytes=95 * GIB,
        hbm_bandwidth=2765 * GB,
        links=6,
        link_bandwidth=100 * GB,
        dcn_bandwidth=50 / 8 * GB,
        host_bandwidth=16 * GB,
        program_bytes=int(95.73 * GIB),  # more than the vendor states
        matrix_unit=128,
        judged=(0.93, 1.08),
    ),
    "v6e": Chip(
        "TPU v6 lite",
        _flops(918, 918, int8=1836),
        hbm_bytes=32 * GIB,
        hbm_bandwidth=1638 * GB,
        links=4,
        link_bandwidth=100 * GB,
        dcn_bandwidth=100 / 8 * GB,
        host_bandwidth=15 * GB,
        program_bytes=int(31.24 * GIB),
        matrix_unit=256,
        sparse_cores=True,
        hidden={"reduce-scatter": 0.8},
        achievable=TPU_V6E,
        judged=(0.94, 1.07),
    ),
    "tpu7x": Chip(
        "TPU7x",
        _flops(2307, 4614),
        devices=2,
        hbm_bytes=192 * GIB,
        hbm_bandwidth=7380 * GB,
        links=6,
        link_bandwidth=100 * GB,
        dcn_bandwidth=100 / 8 * GB,
        host_bandwidth=32 * GB,
        program_bytes=int(94.74 * GIB),
        matrix_unit=256,
        scatters_in_one_step=True,
        hidden={"all-gather": 0.9, "reduce-scatter": 0.98},
        judged=(0.99, 1.21),
    ),
    "a100": Chip(
        "A100",  # the model with 80 GB
        _flops(312),
        hbm_bytes=85_100_068_864,
        hbm_bandwidth=2039 * GB,
        links=12,
        link_bandwidth=25 * GB,
        dcn_bandwidth=200 / 8 * GB,
        host_bandwidth=32 * GB,
        achievable=AMPERE,
        judged=(0.94, 1.31),
    ),
    "h100": _H100,
    "h200": replace(
        _H100,
        kind="H200",
        hbm_bytes=151_397_597_184,
        hbm_bandwidth=4800 * GB,
        judged=None,
    ),
    # Superchips. Without its entry, `chip_of` would take a GH200, which has 96 or
    # 144 GB, for an H200.
    "gh200": Chip("GH200", _flops(989.5, 1979), achievable=HOPPER),
    "gb200": _GB200,
    "gb300": replace(
        _GB200,
        kind="GB300",
        hbm_bytes=297_021_079_552,
        dcn_bandwidth=800 / 8 * GB,
    ),
    "b300": replace(
        _GB200,
        kind="B300",
        flops=_flops(2250, 4500),
        hbm_bytes=297_021_865_984,
        dcn_bandwidth=800 / 8 * GB,
        host_bandwidth=64 * GB,
    ),
    "b200": replace(
        _GB200,
        kind="B200",
        flops=_flops(2250, 4500),
        hbm_bytes=191_514_411_008,
        host_bandwidth=64 * GB,
        judged=(1.0, 2.02),
    ),
}


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip of a JAX device kind, or None for unknown chips and CPUs."""
    matches = [chip for chip in CHIPS.values() if chip.kind in device_kind]
    return max(matches, key=lambda chip: len(chip.kind), default=None)


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of one JAX device, or None if it is unknown."""
    chip = chip_of(device_kind)
    return chip and chip.flops["bfloat16"] / chip.devices
