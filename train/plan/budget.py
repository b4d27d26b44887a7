"""The memory of one device that a step may take."""

import os
from dataclasses import dataclass

import jax

from train.hardware.chips import Chip
from train.mesh import Device
from train.plan.config import MARGIN

_CLOSE = 0.05  # drivers, and what vendors count as a GB, differ by less
_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of one device.

    total: all of it; no less than `program`, which some compilers put higher than the
        vendor does.
    program: what a program can have; the rest is the system's.
    available: the least of that, and of all but the margin.
    note: why a program has no more, and what changes that; "" if nothing does.
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
    """Return the memory of a device; chip None: of this machine's virtual ones.

    `limit` is what a real device's programs have (`memory_limit`). Where that is far
    from what is stated the card has another memory, as an A100 of 40 GB has. Where it
    is close what is stated is taken, so that a plan made elsewhere has the same.
    """
    note = ""
    if chip is None or chip.hbm_bytes is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_devices
        program = total
    elif chip.program_bytes:
        program = chip.program_bytes
        total = max(chip.hbm_bytes // chip.devices, program)
    else:
        total, part = chip.hbm_bytes // chip.devices, memory_fraction()
        program = int(part * total)
        note = (
            f"JAX takes {part:.0%} of a GPU; to change that, here and in training, set "
            f"{_FRACTION[0]}=0.92, say, in the environment"
        )
    if limit is not None and abs(limit / program - 1) > _CLOSE:
        total, program = total * limit // program, limit
    return MemoryBudget(total, program, min(program, int((1 - margin) * total)), note)


def memory_limit(device: Device) -> int | None:
    """Return the bytes that programs have of a device, as its allocator says.

    None where it says nothing: a CPU, and a device that is not this process's.
    """
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (AttributeError, jax.errors.JaxRuntimeError):  # a stand-in; a fake one
        return None


def memory_fraction() -> float:
    """Return the part of a GPU's memory that JAX takes.

    Source: docs.jax.dev, GPU memory allocation.
    """
    return float(next(filter(None, map(os.environ.get, _FRACTION)), 0.75))
