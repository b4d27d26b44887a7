"""The memory of one device that a step may take."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import jax

from train.hardware.chips import Chip, chip_of
from train.plan.config import MARGIN
from train.resolve.mesh import Device
from train.runtime import FRACTION_VARIABLES

# A device's reported limit replaces the chip's figure only if they differ by more than
# this fraction, so that a plan made without the device usually has the same budget.
_LIMIT_TOLERANCE = 0.05
# The fraction of a GPU's memory that JAX preallocates (docs.jax.dev, GPU memory
# allocation), unless `runtime.gpu_tuning` sets another.
_DEFAULT_FRACTION = "0.75"


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of one device.

    program: the bytes that a program can use; the system reserves the rest.
    total: the device's bytes as the vendor states them, or `program` if that is larger.
    available: `total` less the margin, but at most `program`.
    note: why a program cannot use more and how to change this, or "".
    """

    total: int
    program: int
    available: int
    note: str = ""


def memory_budget(
    chip: Chip | None,
    margin: float = MARGIN,
    num_devices: int = 1,
    limit: int | None = None,
) -> MemoryBudget:
    """Return the memory budget of a device, of which the fraction `margin` stays free.

    If `chip` is None, `num_devices` devices share the host's memory. `limit` is a real
    device's limit.
    """
    note = ""
    if chip is None or chip.hbm_bytes is None:
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total_bytes = program_bytes = host_bytes // num_devices
    elif chip.program_bytes:
        program_bytes = chip.program_bytes
        total_bytes = max(chip.hbm_bytes // chip.devices, program_bytes)
    else:
        set_fractions = filter(None, map(os.environ.get, FRACTION_VARIABLES))
        fraction = float(next(set_fractions, _DEFAULT_FRACTION))
        total_bytes = chip.hbm_bytes // chip.devices
        program_bytes = int(fraction * total_bytes)
        note = f"JAX takes {fraction:.0%} of a GPU; to change that, here and in "
        note += f"training, set {FRACTION_VARIABLES[0]}=0.92, say, in the environment"
    if limit is not None and abs(limit / program_bytes - 1) > _LIMIT_TOLERANCE:
        total_bytes = total_bytes * limit // program_bytes
        program_bytes = limit
    available = min(program_bytes, int((1 - margin) * total_bytes))
    return MemoryBudget(total_bytes, program_bytes, available, note)


def budget_of(devices: Sequence[Device], margin: float = MARGIN) -> MemoryBudget:
    """Return the memory budget of each of the devices, which may not be present."""
    chip = chip_of(devices[0].device_kind)
    limit = None
    with suppress(AttributeError, jax.errors.JaxRuntimeError):  # not of this process
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return memory_budget(chip, margin, num_devices=len(devices), limit=limit)
