"""Simulate the timeline of one layer: what a device computes, sends and waits for.

A layer is one trip of the loop over layers in a compiled step. Instructions run in the
order in which XLA scheduled them. The device's computation is one lane, and each
network along a set of mesh axes is another. A lane runs one thing at a time.

- An instruction takes as long as its FLOPs or its main-memory traffic, whichever is
  longer. All kernels of a kind take the same time in a pass.
- A collective takes as long as a device needs to send its bytes.
- An asynchronous operation starts when its lane is free. The instruction that needs its
  result waits for its end. The device waits at once for a synchronous collective.
- Asynchronous copies between memories have a separate lane. They take no bandwidth from
  the instructions that overlap them.

So the simulated times are the shortest that the schedule allows, without overheads.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
from train.plan.compiled.hlo import Computation, Executed, Instruction, Loop, Module
from train.plan.cost import StepCost
from train.plan.rates import Rates
from train.plan.sections import scope_in_name, section_of
from train.units import format_bytes

COMPUTE, COPIES = "compute", "copies between memories"  # lanes besides networks
PRODUCT, ATTENTION, MEMORY, WAIT = "product", "attention", "memory", "wait"
_SECTIONS = ("layers forward", "layers backward")
_KERNELS = (ATTENTION, PRODUCT)
_HOST = ("send", "recv", "send-done", "recv-done")


@dataclass(frozen=True)
class Span:
    """A time span of a lane.

    kind: PRODUCT, ATTENTION, MEMORY, WAIT or the kind of a collective.
    waiter: the instruction that waits for the end of asynchronous work, if any.
    """

    lane: str
    kind: str
    seconds: float
    label: str
    detail: str = ""
    waiter: str = ""
    start_s: float = 0.0

    @property
    def end_s(self) -> float:
        """When the span ends."""
        return self.start_s + self.seconds


@dataclass(frozen=True)
class Timeline:
    """One trip of a loop over layers.

    name: `forward` or `backward`.
    trips: the number of trips of the loop.
    spans: the spans sorted by start. Spans of the same lane do not overlap.
    """

    name: str
    trips: int
    spans: list[Span]

    @property
    def seconds(self) -> float:
        """The end of the last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    def busy(self, *kinds: str) -> float:
        """Return the total seconds of the spans of the given kinds."""
        return sum(span.seconds for span in self.spans if span.kind in kinds)


def layer_timelines(
    module: Module,
    mesh: Mesh,
    rates: Rates,
    kernel_seconds: Mapping[tuple[str, str], float],
) -> list[Timeline]:
    """Simulate a layer's forward and backward pass; [] if no loop runs layers.

    `kernel_seconds` is the result of `average_kernel_seconds`.
    """
    loops = defaultdict[str, list[Loop]](list)
    for executed in module.executed:
        if executed.instruction.opcode == "while":
            loop = executed.instruction.loop
            loops[scope_in_name(loop.op_name)].append(loop)

    def loop_flops(loop: Loop) -> float:
        return loop.trips * sum_flops(loop.body.order)

    timelines = []
    for section in filter(loops.get, _SECTIONS):
        # Loops inside a layer have fewer FLOPs than the loop around them.
        longest = max(loops[section], key=loop_flops)
        kernels = {kind: kernel_seconds.get((section, kind), 0.0) for kind in _KERNELS}
        device = _Device(module, mesh, rates, kernels)
        device.run(longest.body)
        name = section.removeprefix("layers ")
        timelines.append(Timeline(name, longest.trips, device.finish()))
    return timelines


def average_kernel_seconds(
    module: Module, cost: StepCost, rates: Rates
) -> dict[tuple[str, str], float]:
    """Return the average seconds of one kernel, by section and kind of span."""
    executions = Counter[tuple[str, str]]()
    for executed in module.executed:
        section = section_of(scope_of(executed, executed.instruction))
        for inner in executed.instruction.with_nested:
            executions[section, _kernel_kind(inner)] += executed.count
    flops = {(s.name, ATTENTION): s.flops.attention for s in cost.sections}
    flops |= {(s.name, PRODUCT): s.flops.grouped for s in cost.sections}
    return {
        kernels: total / executions[kernels] / rates.flops
        for kernels, total in flops.items()
        if executions[kernels]
    }


def _kernel_kind(instruction: Instruction) -> str:
    """Return the kind of a kernel's span, or "" if an instruction is not a kernel."""
    if is_attention(instruction):
        return ATTENTION
    return PRODUCT if is_grouped(instruction) else ""


class _Device:
    """A simulated device: it runs computations and records spans."""

    def __init__(
        self, module: Module, mesh: Mesh, rates: Rates, kernels: Mapping[str, float]
    ):
        self._mesh, self._rates, self._kernels = mesh, rates, kernels
        self._free = defaultdict[str, float](float)  # when each lane becomes free
        # The end and label of asynchronous work, by the waiting instruction's name.
        self._pending = dict[str, tuple[float, str]]()
        self._spans = list[Span]()
        self._bodies = defaultdict[Computation, list[Executed]](list)
        for executed in module.executed:
            self._bodies[executed.instruction.computation].append(executed)
        self._cached_work = functools.cache(self._work_of)

    def finish(self) -> list[Span]:
        """Complete pending asynchronous operations and return all spans, by start."""
        for name in sorted(self._pending, key=lambda name: self._pending[name]):
            self._wait_for(name)
        spans = (span for span in self._spans if span.seconds > 0)
        return sorted(spans, key=lambda span: span.start_s)

    def run(self, computation: Computation) -> None:
        """Simulate one execution of a computation."""
        for executed in self._bodies[computation]:
            instruction = executed.instruction
            self._wait_for(instruction.name)
            if instruction.opcode == "while":
                for _ in range(instruction.loop.trips):
                    self.run(instruction.body)
            elif instruction.opcode in ("call", "conditional"):
                # The branch that is taken most often represents all branches.
                self.run(max(instruction.called, key=self._executions))
            else:
                for work in self._cached_work(executed):
                    self._start(work)
                # The device waits at once for a synchronous collective.
                self._wait_for(instruction.name)

    def _executions(self, called: Computation) -> int:
        return max((executed.count for executed in self._bodies[called]), default=0)

    def _start(self, work: Span) -> None:
        start_s = max(self._free[COMPUTE], self._free[work.lane])
        self._spans.append(replace(work, start_s=start_s))
        end_s = self._free[work.lane] = start_s + work.seconds
        if work.lane != COMPUTE:
            pending = self._pending.get(work.waiter, (0.0, ""))
            self._pending[work.waiter] = max((end_s, work.label), pending)

    def _wait_for(self, name: str) -> None:
        """Wait for the asynchronous work whose result an instruction needs, if any."""
        end_s, label = self._pending.pop(name, (0.0, ""))
        wait_s = end_s - self._free[COMPUTE]
        if wait_s > 0:
            self._start(Span(COMPUTE, WAIT, wait_s, f"waits for {label}"))

    def _work_of(self, executed: Executed) -> list[Span]:
        """Return what an instruction starts, as spans without a start."""
        instruction, opcode = executed.instruction, executed.instruction.opcode
        works = [
            self._collective_work(collective, instruction)
            for collective in started_collectives(executed, self._mesh)
        ]
        if opcode.removesuffix("-start") in KINDS or opcode in _HOST:
            return works
        kind, busy_s, rates = MEMORY, 0.0, self._rates
        for inner in instruction.with_nested:
            if kernel := _kernel_kind(inner):
                kind, busy_s = kernel, busy_s + self._kernels.get(kernel, 0.0)
            elif flops := product_flops(inner):
                rate = rates.eight_bits if has_eight_bits(inner) else rates.flops
                kind, busy_s = PRODUCT, busy_s + flops / rate
        traffic = memory_traffic(instruction)
        done_names = [u.name for u in instruction.users if u.opcode.endswith("-done")]
        waiter = done_names[0] if opcode.endswith("-start") and done_names else ""
        work = Span(
            lane=COPIES if waiter else COMPUTE,
            kind=kind,
            seconds=max(busy_s, traffic / rates.memory),
            label=ATTENTION if kind == ATTENTION else _label(instruction),
            detail=f"{instruction.name}: {format_bytes(traffic)}",
            waiter=waiter,
        )
        return [*works, work]

    def _collective_work(
        self, collective: Collective, instruction: Instruction
    ) -> Span:
        group, uses = collective.group, dict.fromkeys(use for use, _ in collective.uses)
        sent = f"{format_bytes(collective.sent)} sent by each of {group.size}"
        return Span(
            lane=f"{group.network}: {' and '.join(group.axes) or 'no axis'}",
            kind=collective.kind,
            seconds=collective.sent / self._rates.send(group),
            label=f"{collective.kind} {', '.join(uses)}",
            detail=f"{collective.name}: {sent}",
            waiter=collective.waiter if collective.is_async else instruction.name,
        )


def _label(instruction: Instruction) -> str:
    name = instruction.op_name
    label = part_in_name(name) or name.rpartition("/")[2] or instruction.opcode
    return label + (", again" if "rematted_computation" in name else "")
