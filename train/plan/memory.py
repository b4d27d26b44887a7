"""Itemise the memory of one device, and of a host during a save.

Each figure is computed (exact, from shapes and shardings), compiled (reported by the
compiler) or a lower bound. The compiler's temporaries include gradients and
activations. The item `gradients` assumes that all gradients exist at once.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.stages import Compiled

from train.console import print_table
from train.core.layout import bytes_per_device
from train.core.program import Program
from train.core.state import as_saved
from train.plan.aot import Compilation, OutOfMemory
from train.plan.budget import MemoryBudget
from train.plan.cost import COMPILED
from train.units import format_bytes, format_seconds

COMPUTED = "computed"
LOWER_BOUND = "lower bound"
HELD = ("parameters", "optimizer state", "batch")  # on the device during the whole run


@dataclass(frozen=True)
class Figure:
    """A number of bytes, and whether it is computed, compiled or a lower bound."""

    bytes: int
    how: str


class Verdict(NamedTuple):
    """Whether a step fits into a device's memory, for people.

    answer: "yes", "no" or "not known".
    reason: what is to spare or too much, or how to know.
    """

    answer: str
    reason: str


def judge(needed: Figure, available: int) -> Verdict:
    """Return whether a step fits; if only a lower bound does, this is not known."""
    spare = available - needed.bytes
    if spare < 0:
        return Verdict("no", f"{format_bytes(-spare)} too much")
    if needed.how == LOWER_BOUND:
        return Verdict("not known", "compile the step to know")
    return Verdict("yes", f"{format_bytes(spare)} to spare")


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that a step needs.

    parts: bytes on one device, by name. Some parts overlap: arguments are the state and
        the batch, and gradients are among the temporaries.
    needed: the total on one device.
    host_save: an upper bound of one host's memory that an asynchronous save takes.
    checkpoint: the bytes of a checkpoint on disk, before compression.
    temporaries: the known items of one device's temporaries, by name.
    host: bytes in host memory for one device, by name.
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
    state = program.state
    devices = list(program.mesh.devices.flat)
    other_state = _per_device(state._replace(params=None))
    in_host_memory = _per_device(program.host_state)
    parts = {
        "parameters": _per_device(state.params),
        "optimizer state": Figure(other_state.bytes - in_host_memory.bytes, COMPUTED),
        "batch": _per_device(program.batch),
        "gradients": _per_device(state.params),
    }
    needed = Figure(sum(parts[name].bytes for name in HELD), COMPUTED)
    host = {"optimizer state": in_host_memory} if in_host_memory.bytes else {}
    if isinstance(compiled, OutOfMemory):
        needed = Figure(compiled.needed_bytes, COMPILED)
    elif compiled is not None:
        compiled_parts, host = _compiled_parts(compiled, devices[0].platform)
        needed = Figure(sum(part.bytes for part in compiled_parts.values()), COMPILED)
        parts |= compiled_parts
    process = devices[0].process_index
    local_devices = sum(device.process_index == process for device in devices)
    checkpoint_bytes = host_save_bytes = 0
    for leaf in jax.tree.leaves(as_saved(state)):
        size = leaf.size * leaf.dtype.itemsize
        checkpoint_bytes += size
        # A host copies each replicated shard only once.
        host_save_bytes += min(size, local_devices * bytes_per_device(leaf))
    return DeviceMemory(
        parts=parts,
        needed=needed,
        host_save=Figure(host_save_bytes, COMPUTED),
        checkpoint=Figure(checkpoint_bytes, COMPUTED),
        host=host,
        devices_per_host=local_devices,
    )


def print_memory(
    memory: DeviceMemory, budget: MemoryBudget | None, compilation: Compilation | None
) -> None:
    """Print every figure and its source, and compare their sum with a given budget."""
    items = {**memory.parts, **memory.temporaries}
    print_table(
        [[name, format_bytes(x.bytes), x.how] for name, x in items.items() if x.bytes],
        ["memory of a device", "bytes", "source"],
        "memory (gradients, activations and logits are among the temporaries)",
    )
    if compilation:
        print(f"compiled    in {format_seconds(compilation.seconds)}")
    print(
        f"host        {format_bytes(memory.host_held)} while training, "
        f"{format_bytes(memory.host_save.bytes)} more during a save"
    )
    print(f"checkpoint  {format_bytes(memory.checkpoint.bytes)} before compression")
    if budget is None:
        return
    needed = memory.needed
    at_least = "at least " if needed.how == LOWER_BOUND else ""
    print(
        f"needed      {at_least}{format_bytes(needed.bytes)} a device ({needed.how}), "
        f"available {format_bytes(budget.available)} of {format_bytes(budget.total)}"
    )
    if budget.note:
        print(f"            {budget.note}")


def _compiled_parts(
    compiled: Compiled, platform: str
) -> tuple[dict[str, Figure], dict[str, Figure]]:
    """Return the memory of one device and of its host that the compiler reports.

    XLA:TPU counts the carry of a loop twice in `temp_size_in_bytes`
    (docs/log/compiled.md). So on TPUs the temporaries are derived from the peak, unless
    there are temporaries in host memory, which the peak includes.
    """
    stats: Any = compiled.memory_analysis()
    arguments = stats.argument_size_in_bytes
    # The new state reuses the memory of the old one (`alias`).
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporaries = stats.temp_size_in_bytes
    has_peak = platform == "tpu" and stats.peak_memory_in_bytes
    if has_peak and not stats.host_temp_size_in_bytes:
        # XLA's peak includes arguments in host memory.
        peak = stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes
        temporaries = peak - arguments - outputs
    on_device = {
        "arguments": arguments,
        "temporaries": temporaries,
        "outputs": outputs,
        "code": stats.generated_code_size_in_bytes,
    }
    on_host = {
        "arguments": stats.host_argument_size_in_bytes,
        "temporaries": stats.host_temp_size_in_bytes,
        "outputs": stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes,
    }
    return (
        {name: Figure(size, COMPILED) for name, size in on_device.items()},
        {name: Figure(size, COMPILED) for name, size in on_host.items() if size},
    )


def _per_device(tree: Any) -> Figure:
    return Figure(sum(map(bytes_per_device, jax.tree.leaves(tree))), COMPUTED)
