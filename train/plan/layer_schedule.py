"""Simulate the timeline of one layer: what a device computes, sends and waits for.

A layer is one trip of the loop over layers in a compiled step. Instructions run in the
order in which XLA scheduled them. The device's computation is one lane, and each
network along a set of mesh axes is another. A lane runs one thing at a time.

An instruction takes as long as its FLOPs or its main-memory traffic, whichever is
longer. A collective takes as long as a device needs to send its bytes, and starts when
its lane is free. The instruction that needs its result waits for its end. Asynchronous
copies between memories take no time, and inner loops run all their trips at once. So
the simulated times are the shortest that the schedule allows.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from jax.sharding import Mesh

from train.plan.compiled.attribution import part_in_name, scope_of
from train.plan.compiled.collectives import KINDS, Collective, started_collectives
from train.plan.compiled.flops import (
    has_eight_bits,
    is_attention,
    is_grouped,
    product_flops,
    sum_flops,
)
from train.plan.compiled.hbm_bytes import memory_traffic
from train.plan.compiled.hlo import Executed, Instruction, Module
from train.plan.cost import SectionCost
from train.plan.rates import Rates
from train.plan.sections import scope_in_name, section_of

COMPUTE = "compute"  # the lane besides those of networks
PRODUCT = "product"
ATTENTION = "attention"
MEMORY = "memory"
WAIT = "wait"
# Instructions that move data while others run, or that wait for such a move.
_TRANSFERS = (*KINDS, "send", "recv")


@dataclass(frozen=True)
class Span:
    """A time span of a lane; `kind` is one of those above or a collective's kind."""

    kind: str
    label: str
    start_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        """When the span ends."""
        return self.start_s + self.seconds


@dataclass(frozen=True)
class Timeline:
    """One trip of a loop over layers.

    name: `forward` or `backward`.
    trips: the number of trips of the loop.
    lanes: the spans of each lane, sorted by start. They do not overlap.
    """

    name: str
    trips: int
    seconds: float
    lanes: dict[str, list[Span]]


def layer_timelines(
    module: Module, mesh: Mesh, rates: Rates, sections: Iterable[SectionCost]
) -> list[Timeline]:
    """Simulate a layer's forward and backward pass; [] if no loop runs layers.

    `sections` are those of the step's cost. They state the FLOPs of kernels.
    """
    timelines = []
    for section in sections:
        whiles = (
            e.instruction for e in module.executed if e.instruction.opcode == "while"
        )
        loops = [
            w.loop for w in whiles if scope_in_name(w.loop.op_name) == section.name
        ]
        if loops and section.name in ("layers forward", "layers backward"):
            # Loops inside a layer have fewer FLOPs than the loop around them.
            longest = max(loops, key=lambda x: x.trips * sum_flops(x.body.order))
            kernel_seconds = _average_kernel_seconds(module, section, rates)
            device = _Device(mesh, rates, kernel_seconds)
            device.run([e for e in module.executed if longest in e.loops])
            timeline = Timeline(
                name=section.name.removeprefix("layers "),
                trips=longest.trips,
                seconds=device.lanes[COMPUTE][-1].end_s,
                lanes=dict(device.lanes),
            )
            timelines.append(timeline)
    return timelines


def _average_kernel_seconds(
    module: Module, section: SectionCost, rates: Rates
) -> dict[str, float]:
    """Return the average seconds of a section's kernels, by kind of span."""
    executions = defaultdict[str, float](float)
    for executed in module.executed:
        if section_of(scope_of(executed, executed.instruction)) == section.name:
            for inner in executed.instruction.with_nested:
                executions[_kernel_kind(inner)] += executed.count
    flops = {ATTENTION: section.flops.attention, PRODUCT: section.flops.grouped}
    return {
        kind: total / (executions[kind] or 1) / rates.flops
        for kind, total in flops.items()
    }


def _kernel_kind(instruction: Instruction) -> str:
    """Return the kind of a kernel's span, or "" if an instruction is not a kernel."""
    if is_grouped(instruction):
        return PRODUCT
    return ATTENTION if is_attention(instruction) else ""


class _Device:
    """A simulated device, which records the spans of its lanes."""

    def __init__(self, mesh: Mesh, rates: Rates, kernel_seconds: dict[str, float]):
        self._mesh = mesh
        self._rates = rates
        self._kernel_seconds = kernel_seconds
        self.lanes = defaultdict[str, list[Span]](list, {COMPUTE: []})

    def run(self, layer: list[Executed]) -> None:
        """Simulate the instructions of one layer, which are in scheduled order."""
        # The spans of collectives, by the name of the instruction that waits for them.
        pending = defaultdict[str, list[Span]](list)
        for executed in layer:
            name = executed.instruction.name
            times = executed.count / layer[0].count
            self._wait_for(pending.pop(name, []))
            for collective in started_collectives(executed, self._mesh):
                # The device waits at once for a synchronous collective.
                waiter = collective.waiter if collective.is_async else name
                pending[waiter].append(self._send(collective, times))
            self._compute(executed.instruction, times)
            self._wait_for(pending.pop(name, []))
        self._wait_for(chain.from_iterable(pending.values()))

    def _add(self, lane: str, kind: str, label: str, seconds: float) -> Span:
        """Start work as soon as its lane and the device are free."""
        start_s = max(self._free_s(COMPUTE), self._free_s(lane))
        span = Span(kind, label, start_s, seconds)
        if seconds > 0:
            self.lanes[lane].append(span)
        return span

    def _free_s(self, lane: str) -> float:
        return self.lanes[lane][-1].end_s if self.lanes[lane] else 0.0

    def _wait_for(self, collectives: Iterable[Span]) -> None:
        for span in collectives:
            seconds = span.end_s - self._free_s(COMPUTE)
            self._add(COMPUTE, WAIT, f"waits for {span.label}", seconds)

    def _send(self, collective: Collective, times: float) -> Span:
        group = collective.group
        uses = dict.fromkeys(use for use, _ in collective.uses)
        lane = f"{group.network}: {' and '.join(group.axes) or 'no axis'}"
        label = f"{collective.kind} {', '.join(uses)}"
        seconds = times * collective.sent / self._rates.send(group)
        return self._add(lane, collective.kind, label, seconds)

    def _compute(self, instruction: Instruction, times: float) -> None:
        opcode = instruction.opcode
        name = instruction.op_name
        rates = self._rates
        if opcode in _TRANSFERS or opcode.endswith(("-start", "-done")):
            return
        kind = MEMORY
        seconds = 0.0
        for inner in instruction.with_nested:
            if kernel := _kernel_kind(inner):
                kind = kernel
                seconds = seconds + self._kernel_seconds[kernel]
            elif flops := product_flops(inner):
                rate = rates.eight_bits if has_eight_bits(inner) else rates.flops
                kind = PRODUCT
                seconds = seconds + flops / rate
        seconds = max(seconds, memory_traffic(instruction) / rates.memory)
        label = part_in_name(name) or name.rpartition("/")[2] or opcode
        label += ", again" if "rematted_computation" in name else ""
        self._add(COMPUTE, kind, label, times * seconds)
