"""Simulate the timeline of one layer: what a device computes, sends and waits for.

A layer is one trip of the loop over layers in a compiled step. Instructions run in the
order in which XLA scheduled them. A lane runs one thing at a time. The device's
computation is one lane, and each network along a set of mesh axes is another. The
simulation assumes:

- Each instruction takes as long as its FLOPs or its main-memory traffic, whichever is
  longer, at the given rates.
- A collective takes as long as a device needs to send its bytes at the rate of its
  group.
- An asynchronous operation starts when its lane is free. The instruction that needs its
  result waits for its end. The device waits at once for a synchronous collective.
- Asynchronous copies between memories have a separate lane. They take no bandwidth from
  the instructions that overlap them.

So the simulated times are the shortest that the schedule allows, without overheads.
"""

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass

from jax.sharding import Mesh

from train.plan.compiled.attribution import part_in_name, scope_of
from train.plan.compiled.collectives import KINDS, Collective, started_collectives
from train.plan.compiled.flops import (
    has_eight_bits,
    is_attention,
    product_flops,
    sum_flops,
)
from train.plan.compiled.hbm_bytes import memory_traffic
from train.plan.compiled.hlo import Computation, Executed, Instruction, Loop, Module
from train.plan.rates import Rates
from train.units import format_bytes, format_flops

COMPUTE, COPIES = "compute", "copies between memories"  # lanes besides networks
PRODUCT, ATTENTION, MEMORY, WAIT = "product", "attention", "memory", "wait"
_HOST = ("send", "recv", "send-done", "recv-done")


@dataclass(frozen=True)
class Span:
    """A time span of a lane. `kind` is PRODUCT, ..., WAIT or a collective's kind."""

    lane: str
    kind: str
    start_s: float
    seconds: float
    label: str
    detail: str


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
        return max((s.start_s + s.seconds for s in self.spans), default=0.0)

    def busy(self, *kinds: str) -> float:
        """Return the total seconds of the spans of the given kinds."""
        return sum(span.seconds for span in self.spans if span.kind in kinds)


def layer_timelines(module: Module, mesh: Mesh, rates: Rates) -> list[Timeline]:
    """Simulate a layer's forward and backward pass; [] if no loop runs layers."""
    timelines = []
    for name, loop in layer_loops(module).items():
        device = _Device(module, mesh, rates)
        device.run(loop.body)
        spans = sorted(device.finish(), key=lambda span: span.start_s)
        timelines.append(Timeline(name, loop.trips, spans))
    return timelines


def layer_loops(module: Module) -> dict[str, Loop]:
    """Return the longest loop over layers of each pass, `forward` and `backward`."""
    loops_by_pass = dict[str, list[Loop]]()
    for executed in module.executed:
        if executed.instruction.opcode != "while":
            continue
        loop = executed.instruction.loop
        bodies = [layers.body for layers in itertools.chain(*loops_by_pass.values())]
        if any(outer.body in bodies for outer in executed.loops):
            continue  # a loop inside a layer
        loops = (*executed.loops, loop)
        in_loop = Executed(loop.instruction, executed.count, loops)
        scope, _, pass_name = scope_of(in_loop, loop.instruction).partition(" ")
        if scope == "layers" and pass_name:
            loops_by_pass.setdefault(pass_name, []).append(loop)

    def loop_flops(loop: Loop) -> float:
        return loop.trips * sum_flops(loop.body.order)

    return {
        name: max(loops_by_pass[name], key=loop_flops)
        for name in sorted(loops_by_pass, reverse=True)
    }


@dataclass(frozen=True)
class _Cost:
    """The cost of an instruction.

    collectives: the collectives that the instruction starts.
    waiter: the instruction that waits for an asynchronous copy; otherwise "".
    """

    kind: str
    seconds: float
    label: str
    detail: str
    collectives: tuple[Collective, ...] = ()
    waiter: str = ""


class _Device:
    """A simulated device: it runs computations and records spans."""

    def __init__(self, module: Module, mesh: Mesh, rates: Rates):
        self._mesh, self._rates = mesh, rates
        self._now = 0.0  # simulated seconds
        self._free = dict[str, float]()  # when each lane becomes free
        # The end and label of asynchronous work, by the waiting instruction's name.
        self._pending = dict[str, tuple[float, str]]()
        self._spans = list[Span]()
        self._bodies = defaultdict[Computation, list[Executed]](list)
        for executed in module.executed:
            self._bodies[executed.instruction.computation].append(executed)
        self._cost_of = functools.cache(self._cost)

    def finish(self) -> list[Span]:
        """Complete pending asynchronous operations and return all spans."""
        for name in sorted(self._pending, key=lambda name: self._pending[name]):
            self._wait_for(name)
        return [span for span in self._spans if span.seconds > 0]

    def run(self, computation: Computation) -> None:
        """Simulate one execution of a computation."""
        for executed in self._bodies[computation]:
            instruction = executed.instruction
            if instruction.name in self._pending:
                self._wait_for(instruction.name)
            if instruction.opcode == "while":
                for _ in range(instruction.loop.trips):
                    self.run(instruction.body)
            elif instruction.opcode in ("call", "conditional"):
                # The branch that is taken most often represents all branches.
                self.run(max(instruction.called, key=self._executions))
            else:
                self._run_instruction(instruction, self._cost_of(executed))

    def _executions(self, called: Computation) -> int:
        return max((executed.count for executed in self._bodies[called]), default=0)

    def _run_instruction(self, instruction: Instruction, cost: _Cost) -> None:
        if cost.waiter:
            self._add_pending(cost.waiter, self._add_span(COPIES, cost), cost.label)
            return
        ends = [(c, self._start_collective(c)) for c in cost.collectives]
        if cost.seconds:
            self._now = self._add_span(COMPUTE, cost)
        for collective, end in ends:
            waiter = collective.waiter if collective.is_async else instruction.name
            self._add_pending(waiter, end, _collective_label(collective))
            if not collective.is_async:
                self._wait_for(waiter)

    def _start_collective(self, collective: Collective) -> float:
        group = collective.group
        axes = " and ".join(group.axes) or "no axis"
        seconds = collective.sent / self._rates.send(group)
        detail = (
            f"{collective.name}: {format_bytes(collective.sent)} sent of "
            f"{format_bytes(collective.payload)}, by each of {group.size}"
        )
        lane = f"{group.network}: {axes}"
        label = _collective_label(collective)
        return self._add_span(lane, _Cost(collective.kind, seconds, label, detail))

    def _add_pending(self, waiter: str, end: float, label: str) -> None:
        self._pending[waiter] = max((end, label), self._pending.get(waiter, (0.0, "")))

    def _add_span(self, lane: str, cost: _Cost) -> float:
        """Add a span that starts when its lane is free, and return its end."""
        start = max(self._now, self._free.get(lane, 0.0))
        self._spans.append(
            Span(
                lane,
                cost.kind,
                start_s=start,
                seconds=cost.seconds,
                label=cost.label,
                detail=cost.detail,
            )
        )
        self._free[lane] = start + cost.seconds
        return start + cost.seconds

    def _wait_for(self, name: str) -> None:
        end, label = self._pending.pop(name)
        if end > self._now:
            wait = _Cost(WAIT, end - self._now, f"waits for {label}", "")
            self._add_span(COMPUTE, wait)
            self._now = self._free[COMPUTE] = end

    def _cost(self, executed: Executed) -> _Cost:
        instruction = executed.instruction
        collectives = tuple(started_collectives(executed, self._mesh))
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in KINDS or opcode in _HOST:
            return _Cost(MEMORY, 0.0, "", "", collectives)
        has_attention, products, busy_s = False, 0.0, 0.0
        for inner in instruction.with_nested:
            product, rate = product_flops(inner), self._rates.flops
            if product and has_eight_bits(inner):
                rate = self._rates.eight_bits
            products, busy_s = products + product, busy_s + product / rate
            has_attention |= is_attention(inner)
        traffic = memory_traffic(instruction)
        seconds = max(busy_s, traffic / self._rates.memory)
        kind = ATTENTION if has_attention else PRODUCT if products else MEMORY
        done_names = [u.name for u in instruction.users if u.opcode.endswith("-done")]
        is_copy = opcode.endswith("-start") and seconds and done_names
        waiter = done_names[0] if is_copy else ""
        flops_text = f"{format_flops(products)}, " if products else ""
        detail = f"{instruction.name}: {flops_text}{format_bytes(traffic)}"
        label = "attention" if has_attention else _instruction_label(instruction)
        return _Cost(kind, seconds, label, detail, collectives, waiter)


def _collective_label(collective: Collective) -> str:
    uses = dict.fromkeys(use for use, _ in collective.uses if use != "scalars")
    return f"{collective.kind} {', '.join(uses) or 'scalars'}"


def _instruction_label(instruction: Instruction) -> str:
    name = instruction.op_name
    label = part_in_name(name) or name.rpartition("/")[2] or instruction.opcode
    return label + (", again" if "rematted_computation" in name else "")
