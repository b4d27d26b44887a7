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

from train.program import Program

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
# libtpu says "the total memory required for HLO temporaries (20.1G) exceeds available
# HBM (15.75G)"; older versions say "Used 20.1G of 15.75G hbm".
_OUT_OF_MEMORY = (
    rf"memory required[^(]*\({_SIZE}\) exceeds available HBM \({_SIZE}\)",
    rf"Used {_SIZE} of {_SIZE} hbm",
)


class OutOfMemory(Exception):
    """The compiler found no way to fit a step into a device's memory."""

    def __init__(self, needed_bytes: int, available_bytes: int):
        super().__init__(needed_bytes, available_bytes)
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


@dataclass(frozen=True)
class Compilation:
    """The time of compiling, and this process's peak memory afterwards."""

    seconds: float
    peak_rss_bytes: int


def compile_step(program: Program) -> Compiled:
    """Compile the training step of a program for its devices.

    Raises:
        OutOfMemory: if the compiler reports that the step does not fit.
    """
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
    platform = program.mesh.devices.flat[0].platform
    lowering = "cuda" if platform == "gpu" else platform
    traced = program.train_step.trace(program.state, program.batch)
    return traced, traced.lower(lowering_platforms=(lowering,))


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
    for pattern in _OUT_OF_MEMORY:
        if match := re.search(pattern, message):
            number, unit, limit, limit_unit = match.groups()
            available = _parse_bytes(limit, limit_unit)
            return OutOfMemory(_parse_bytes(number, unit), available)
    return None


def _parse_bytes(number: str, unit: str) -> int:
    return math.ceil(float(number) * _UNITS[unit])
