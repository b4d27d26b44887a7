"""Itemise the memory of one device, and of a host during a save.

Each figure is computed (exact, from shapes and shardings), compiled (reported by the
compiler) or a lower bound. The compiler's temporaries include gradients and
activations. The item `gradients` assumes that all gradients exist at once.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from model.axes import mesh_axes
from train.console import print_table
from train.plan.aot import Compilation, OutOfMemory
from train.plan.budget import MemoryBudget
from train.plan.cost import COMPILED
from train.program import Program
from train.sharding import bytes_per_device
from train.state import as_saved
from train.units import format_bytes, format_seconds

COMPUTED, LOWER_BOUND = "computed", "lower bound"
HELD = ("parameters", "optimizer state", "batch")  # on the device during the whole run


@dataclass(frozen=True)
class Figure:
    """A number of bytes, and whether it is computed, compiled or a lower bound."""

    bytes: int
    how: str


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that a step needs.

    parts: bytes on one device, by name. Some parts overlap: arguments are the state and
        the batch, and gradients are among the temporaries.
    needed: the total on one device.
    host: bytes in host memory for one device, by name.
    devices_per_host: the number of devices that share one host's memory.
    host_save: the most bytes that an asynchronous save keeps in one host's memory.
    checkpoint: the bytes of a checkpoint on disk, before compression.
    temporaries: the known items of one device's temporaries, by name.
    """

    parts: dict[str, Figure]
    needed: Figure
    host_save: Figure
    checkpoint: Figure
    temporaries: dict[str, Figure] = field(default_factory=dict)
    host: dict[str, Figure] = field(default_factory=dict)
    devices_per_host: int = 1

    def fits(self, budget: MemoryBudget) -> bool:
        """Return whether the step fits into the budget."""
        return self.needed.bytes <= budget.available

    @property
    def held(self) -> int:
        """The bytes that the state and the batch occupy on one device."""
        return sum(self.parts[name].bytes for name in HELD)

    @property
    def host_held(self) -> int:
        """The bytes of one host's memory that a step needs, for all its devices."""
        return self.devices_per_host * sum(part.bytes for part in self.host.values())

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values, each as {"bytes", "how"}."""
        figures = dataclasses.asdict(self)
        del figures["devices_per_host"]
        host = {"host_held_bytes": self.host_held}
        return {"per_device": figures.pop("parts"), **figures, **host}


def device_memory(
    program: Program, compiled: Compiled | OutOfMemory | None = None
) -> DeviceMemory:
    """Return the memory that a program's step needs.

    `compiled` is the compiled step or the compiler's error. If it is None, only the
    state and the batch are counted.
    """
    state, batch = program.state, program.batch
    other_state = _per_device(state._replace(params=None))
    in_host_memory = _per_device(program.host_state)
    parts = {
        "parameters": _per_device(state.params),
        "optimizer state": Figure(other_state.bytes - in_host_memory.bytes, COMPUTED),
        "batch": _per_device(batch),
        "gradients": _per_device(state.params),
    }
    needed = Figure(sum(parts[name].bytes for name in HELD), COMPUTED)
    host = {"optimizer state": in_host_memory} if in_host_memory.bytes else {}
    if isinstance(compiled, OutOfMemory):
        needed = Figure(compiled.needed_bytes, COMPILED)
    elif compiled is not None:
        on_tpu = program.mesh.devices.flat[0].platform == "tpu"
        sizes = _compiled_parts(compiled, on_tpu)
        needed = Figure(sum(sizes.values()), COMPILED)
        parts |= {name: Figure(size, COMPILED) for name, size in sizes.items()}
        host = _compiled_host_parts(compiled)
    saved = jax.tree.leaves(as_saved(state))
    checkpoint_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in saved)
    return DeviceMemory(
        parts=parts,
        needed=needed,
        host_save=Figure(_host_bytes(saved, program.mesh), COMPUTED),
        checkpoint=Figure(checkpoint_bytes, COMPUTED),
        host=host,
        devices_per_host=len(_first_host_positions(program.mesh)),
    )


def print_memory(
    memory: DeviceMemory, budget: MemoryBudget | None, compilation: Compilation | None
) -> None:
    """Print every figure and its source, and whether the step fits a given budget."""
    parts = {k: v for k, v in memory.parts.items() if v.bytes}
    print_table(
        [[name, format_bytes(part.bytes), part.how] for name, part in parts.items()],
        ["memory of a device", "bytes", "source"],
        "memory (temporaries include gradients)",
    )
    items = {name: item.bytes for name, item in memory.temporaries.items()}
    if items:
        rows = [[name, format_bytes(size)] for name, size in items.items()]
        rows.append(["total", format_bytes(sum(items.values()))])
        title = "what the temporaries hold at least, from shapes"
        print_table(rows, ["temporaries", "bytes"], title)
    if compilation:
        print(
            f"compiled    in {format_seconds(compilation.seconds)}, this process held "
            f"{format_bytes(compilation.peak_rss_bytes)} at most"
        )
    if memory.host:
        parts = (
            f"{name} {format_bytes(part.bytes)}" for name, part in memory.host.items()
        )
        print(
            f"host        {format_bytes(memory.host_held)} while training, for "
            f"{memory.devices_per_host} devices, each with {', '.join(parts)}"
        )
    print(f"host        {format_bytes(memory.host_save.bytes)} at most during a save")
    print(f"checkpoint  {format_bytes(memory.checkpoint.bytes)} before compression")
    if budget is None:
        return
    print(
        f"memory      {format_bytes(budget.total)} a device, of which a program can "
        f"use {format_bytes(budget.program)}; {format_bytes(budget.available)} with "
        "the margin"
    )
    if budget.note:
        print(f"            {budget.note}")
    needed, spare = memory.needed, budget.available - memory.needed.bytes
    at_least = needed.how == LOWER_BOUND
    print(
        f"needed      {'at least ' * at_least}{format_bytes(needed.bytes)} a device, "
        f"{needed.how}"
    )
    if spare < 0:
        print(f"fits        no, {format_bytes(-spare)} too much")
    elif at_least:
        print(
            f"fits        not known: {format_bytes(spare)} are left for what only a "
            "compiler can count; compile the step to know"
        )
    else:
        print(f"fits        yes, {format_bytes(spare)} to spare")


def _compiled_parts(compiled: Compiled, on_tpu: bool) -> dict[str, int]:
    """Return the bytes of one device that the compiler reports, by name.

    XLA:TPU counts the carry of a loop twice in `temp_size_in_bytes`
    (docs/log/compiled.md). So on TPUs the temporaries are derived from the peak.
    """
    stats: Any = compiled.memory_analysis()
    arguments = stats.argument_size_in_bytes
    # The new state reuses the memory of the old one (`alias`).
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporaries = stats.temp_size_in_bytes
    if on_tpu and stats.peak_memory_in_bytes:
        # XLA's peak includes arguments in host memory.
        peak = stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes
        temporaries = peak - arguments - outputs
    return {
        "arguments": arguments,
        "temporaries": temporaries,
        "outputs": outputs,
        "code": stats.generated_code_size_in_bytes,
    }


def _compiled_host_parts(compiled: Compiled) -> dict[str, Figure]:
    """Return the host memory that the compiler reports, without empty items."""
    stats: Any = compiled.memory_analysis()
    sizes = {
        "arguments": stats.host_argument_size_in_bytes,
        "temporaries": stats.host_temp_size_in_bytes,
        "outputs": stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes,
    }
    return {name: Figure(size, COMPILED) for name, size in sizes.items() if size}


def _first_host_positions(mesh: Mesh) -> list[dict[str, int]]:
    """Return the mesh positions of the first host's devices."""
    host = mesh.devices.flat[0].process_index
    return [
        dict(zip(mesh.axis_names, index, strict=True))
        for index, device in np.ndenumerate(mesh.devices)
        if device.process_index == host
    ]


def _per_device(tree: Any) -> Figure:
    return Figure(sum(map(bytes_per_device, jax.tree.leaves(tree))), COMPUTED)


def _host_bytes(leaves: Iterable[jax.ShapeDtypeStruct], mesh: Mesh) -> int:
    """Count the bytes on one host's devices, counting each replicated shard once."""
    positions, total = _first_host_positions(mesh), 0
    for leaf in leaves:
        sharding = leaf.sharding
        assert isinstance(sharding, NamedSharding)
        axes = [axis for entry in sharding.spec for axis in mesh_axes(entry)]
        shards = {tuple(position[axis] for axis in axes) for position in positions}
        total += len(shards) * bytes_per_device(leaf)
    return total
