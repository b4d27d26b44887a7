"""Compile the training step ahead of time, for devices that may not be present."""

import math
import re
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled, Lowered, Traced

from model.compat import checks_for_gpu
from train.core.program import Program

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# libtpu says "the total memory required for HLO temporaries (20.1G) exceeds available
# HBM (15.75G)".
_SIZE = r"\(([\d.]+)([KMGT]?)\)"
_OUT_OF_MEMORY = re.compile(
    rf"memory required[^(]*{_SIZE} exceeds available HBM {_SIZE}"
)


@dataclass
class OutOfMemory(Exception):
    """The compiler found no way to fit a step into a device's memory."""

    needed_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Compilation:
    """The time of compiling, and this process's peak memory afterwards."""

    seconds: float
    peak_rss_bytes: int


def compile_step(program: Program) -> Compiled:
    """Compile a training step for its devices, or raise OutOfMemory."""
    # GPU autotuning needs the device, which may not be present.
    on_gpu = program.mesh.devices.flat[0].platform == "gpu"
    options: Any = {"xla_gpu_autotune_level": 0} if on_gpu else None
    lowered = lower_step(program)[1]
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise out_of_memory(str(error)) or error from None


def lower_step(program: Program) -> tuple[Traced, Lowered]:
    """Trace and lower the training step of a program for its devices."""
    device = program.mesh.devices.flat[0]
    if device.platform != "gpu":
        traced = program.train_step.trace(program.state, program.batch)
        return traced, traced.lower(lowering_platforms=(device.platform,))
    with checks_for_gpu(device.compute_capability):
        traced = program.train_step.trace(program.state, program.batch)
        return traced, traced.lower(lowering_platforms=("cuda",))


def measure_compile(program: Program) -> tuple[Compiled | OutOfMemory, Compilation]:
    """Return the compiled step, or OutOfMemory, and the cost of compiling."""
    start = time.perf_counter()
    try:
        result = compile_step(program)
    except OutOfMemory as error:
        result = error
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return result, Compilation(time.perf_counter() - start, peak * unit)


def out_of_memory(message: str) -> OutOfMemory | None:
    """Parse a compiler's out-of-memory message; return None for other messages."""
    if not (match := _OUT_OF_MEMORY.search(message)):
        return None
    needed, needed_unit, available, available_unit = match.groups()
    return OutOfMemory(
        math.ceil(float(needed) * _UNITS[needed_unit]),
        math.ceil(float(available) * _UNITS[available_unit]),
    )
