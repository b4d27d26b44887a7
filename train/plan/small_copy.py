"""Copy a program with two repeats of its layers, and extrapolate from it to all layers.

A segment of layers is a loop over repeats of a pattern, and memory is linear in the
number of repeats of the longest one. The walk over the traced program counts what each
repeat adds (estimated/), and the compiled copy supplies everything else.
"""

import math
from dataclasses import replace

from model.pattern import segments_of
from train.plan.memory import DeviceMemory, Figure
from train.resolve.program import ConfiguredProgram, make_program

EXTRAPOLATED = "extrapolated"
_REPEATS = 2


def make_copy(program: ConfiguredProgram) -> ConfiguredProgram | None:
    """Return the program with two repeats of the pattern; None if it has no more."""
    model = program.config.model
    segments = [s for s in segments_of(model) if s.first >= model.layers_before_experts]
    longest = max(segments, key=lambda segment: segment.num_layers)
    period = math.lcm(len(model.layer_pattern or "1"), len(longest.pattern))
    period *= program.pipeline.stages * program.pipeline.repeats
    depth = model.num_layers - longest.num_layers + _REPEATS * period
    if depth >= model.num_layers:
        return None
    layers = model.high_precision_layers
    layers = tuple(n for n in layers if isinstance(n, str) or n < depth)
    model = replace(
        model,
        num_layers=depth,
        high_precision_layers=layers,
        layer_unroll=program.execution.layer_unroll,
    )
    config = replace(program.config, model=model)
    devices = list(program.mesh.devices.flat)
    return make_program(config, devices, num_tokens=program.num_tokens)


def extrapolate_memory(
    copy: DeviceMemory, whole: DeviceMemory, temporaries: int
) -> DeviceMemory:
    """Return the memory of a whole step from the copy's compiled memory.

    `whole` is an estimate of the whole step, whose temporaries exceed those of the copy
    by `temporaries` bytes.
    """
    added = {"arguments": whole.held - copy.held, "temporaries": temporaries}
    parts = {
        name: Figure(copy.parts[name].bytes + size, EXTRAPOLATED)
        for name, size in added.items()
        if name in copy.parts
    }
    needed = Figure(copy.needed.bytes + sum(added.values()), EXTRAPOLATED)
    return replace(whole, parts=whole.parts | parts, needed=needed)
