"""The memory of one device, and of a host while it saves, by what holds it.

Each figure says whether it is computed, from shapes and shardings, exactly; compiled,
the compiler's own; or estimated. The compiler's temporaries hold gradients and
activations: `gradients` says how much gradients are where all exist at once.
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

COMPUTED = "computed"
HELD = ("parameters", "optimizer state", "batch")  # resident during the whole run


@dataclass(frozen=True)
class Figure:
    """Bytes, and how they are known."""

    bytes: int
    how: str


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that a step needs.

    parts: bytes on one device, by name. They overlap: arguments are the state and the
        batch, and gradients are among the temporaries.
    needed: the total on one device.
    host: bytes in host memory for one device, by name.
    devices_per_host: the number of devices that share one host's memory.
    host_save: the most bytes on one host while an asynchronous save copies from it.
    checkpoint: bytes on disk, before compression.
    temporaries: the contents of one device's temporaries, by name.
    """

    parts: dict[str, Figure]
    needed: Figure
    host_save: Figure
    checkpoint: Figure
    temporaries: dict[str, Figure] = field(default_factory=dict)
    host: dict[str, Figure] = field(default_factory=dict)
    devices_per_host: int = 1

    def fits(self, budget: MemoryBudget) -> bool:
        """Tell whether the step fits."""
        return self.needed.bytes <= budget.available

    @property
    def held(self) -> int:
        """Bytes of one device from the first step to the last: state and batch."""
        return sum(self.parts[name].bytes for name in HELD)

    @property
    def host_held(self) -> int:
        """Bytes of one host that a step keeps there, at most."""
        return self.devices_per_host * sum(part.bytes for part in self.host.values())

    def as_json(self) -> dict[str, Any]:
        """Return each figure as {"bytes", "how"}."""
        figures = dataclasses.asdict(self)
        del figures["devices_per_host"]
        host = {"host_held_bytes": self.host_held}
        return {"per_device": figures.pop("parts"), **figures, **host}


def device_memory(
    program: Program, compiled: Compiled | OutOfMemory | None = None
) -> DeviceMemory:
    """Add up what a program's step needs.

    `compiled` is the step, or what became of it; None: of state and batch alone.
    """
    state, batch = program.state, program.batch
    without_params, host_moved = (
        state._replace(params=None),
        _per_device(program.host_state),
    )
    parts = {
        "parameters": _per_device(state.params),
        "optimizer state": Figure(
            _per_device(without_params).bytes - host_moved.bytes, COMPUTED
        ),
        "batch": _per_device(batch),
        "gradients": _per_device(state.params),
    }
    needed = Figure(sum(parts[name].bytes for name in HELD), COMPUTED)
    host = {"optimizer state": host_moved} if host_moved.bytes else {}
    if isinstance(compiled, OutOfMemory):
        needed = Figure(compiled.needed_bytes, COMPILED)
    elif compiled is not None:
        on_tpu = program.mesh.devices.flat[0].platform == "tpu"
        sizes = _compiled_parts(compiled, on_tpu)
        needed = Figure(sum(sizes.values()), COMPILED)
        parts |= {name: Figure(size, COMPILED) for name, size in sizes.items()}
        host = _compiled_host_parts(compiled)
    saved = jax.tree.leaves(as_saved(state))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in saved)
    return DeviceMemory(
        parts=parts,
        needed=needed,
        host_save=Figure(_host_bytes(saved, program.mesh), COMPUTED),
        checkpoint=Figure(size, COMPUTED),
        host=host,
        devices_per_host=len(_of_one_host(program.mesh)),
    )


def print_memory(
    memory: DeviceMemory, budget: MemoryBudget | None, compilation: Compilation | None
) -> None:
    """Print every figure with how it is known; the verdict if there is a budget."""
    meanings = {
        "arguments": "state and batch, as they lie in memory",
        "temporaries": "activations, gradients, buffers",
        "outputs": "what is not written over the arguments",
        "gradients": "among the temporaries, if all exist at once",
    }
    rows = [
        [name, format_bytes(figure.bytes), figure.how, meanings.get(name, "")]
        for name, figure in memory.parts.items()
        if figure.bytes and name not in memory.temporaries
    ]
    print_table(rows, ["memory of a device", "bytes", "is", ""], "memory")
    rows = [
        [name, format_bytes(figure.bytes)]
        for name, figure in memory.temporaries.items()
        if figure.bytes
    ]
    if rows:
        all_of_them = sum(figure.bytes for figure in memory.temporaries.values())
        rows.append(["together", format_bytes(all_of_them)])
        title = "what the temporaries hold, estimated from shapes"
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
            f"host        {format_bytes(memory.host_held)} while training, of "
            f"{memory.devices_per_host} devices each: {', '.join(parts)}"
        )
    print(f"host        {format_bytes(memory.host_save.bytes)} at most during a save")
    print(f"checkpoint  {format_bytes(memory.checkpoint.bytes)} before compression")
    if budget is None:
        return
    part = f", of which a program has {format_bytes(budget.program)}"
    print(
        f"memory      {format_bytes(budget.total)} a device"
        f"{part if budget.program < budget.total else ''}; "
        f"{format_bytes(budget.available)} with the margin"
    )
    if budget.note:
        print(f"            {budget.note}")
    needed = memory.needed.bytes
    spare = budget.available - needed
    print(f"needed      {format_bytes(needed)} a device, {memory.needed.how}")
    fits = f"yes, {format_bytes(spare)} to spare"
    lacks = f"no, {format_bytes(-spare)} too much"
    print(f"fits        {fits if memory.fits(budget) else lacks}")


def _compiled_parts(compiled: Compiled, on_tpu: bool) -> dict[str, int]:
    """Read a compiler's figures.

    XLA:TPU's size of temporaries counts twice what loops hand on, and is more than
    devices have for steps that it says fit (docs/log): there the peak is taken.
    """
    stats: Any = compiled.memory_analysis()
    arguments = stats.argument_size_in_bytes
    # The new state is written over the old one.
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporaries = stats.temp_size_in_bytes
    if on_tpu and stats.peak_memory_in_bytes:  # in it are arguments on the host
        peak = stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes
        temporaries = peak - arguments - outputs
    return {
        "arguments": arguments,
        "temporaries": temporaries,
        "outputs": outputs,
        "code": stats.generated_code_size_in_bytes,
    }


def _compiled_host_parts(compiled: Compiled) -> dict[str, Figure]:
    """Read a compiler's figures of host memory; none if it uses none."""
    stats: Any = compiled.memory_analysis()
    sizes = {
        "arguments": stats.host_argument_size_in_bytes,
        "temporaries": stats.host_temp_size_in_bytes,
        "outputs": stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes,
    }
    return {name: Figure(size, COMPILED) for name, size in sizes.items() if size}


def _of_one_host(mesh: Mesh) -> list[dict[str, int]]:
    """Return the places on the mesh of the first host's devices."""
    host = mesh.devices.flat[0].process_index
    return [
        dict(zip(mesh.axis_names, index, strict=True))
        for index, device in np.ndenumerate(mesh.devices)
        if device.process_index == host
    ]


def _per_device(tree: Any) -> Figure:
    return Figure(sum(map(bytes_per_device, jax.tree.leaves(tree))), COMPUTED)


def _host_bytes(leaves: Iterable[jax.ShapeDtypeStruct], mesh: Mesh) -> int:
    """Count the bytes that one host's devices hold, copies once."""
    places, total = _of_one_host(mesh), 0
    for leaf in leaves:
        sharding = leaf.sharding
        assert isinstance(sharding, NamedSharding)
        axes = [axis for entry in sharding.spec for axis in mesh_axes(entry)]
        shards = {tuple(coordinates[axis] for axis in axes) for coordinates in places}
        total += len(shards) * bytes_per_device(leaf)
    return total
