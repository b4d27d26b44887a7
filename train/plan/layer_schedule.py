"""The timeline of one layer: what a device computes, sends and waits for, and when.

The layer is one iteration of the loop over layers in a compiled step, in the order in
which XLA scheduled its instructions. The model of time:

- A device runs one instruction after another. Each takes the time of its FLOPs or of
  its bytes to and from main memory, whichever is longer.
- A collective takes the time of the bytes that a device sends, at the rate of its
  group. Collectives of the same network and mesh axes run one after another.
- An asynchronous operation starts when its lane is free, and the instruction that needs
  its result waits for its end. Synchronous operations are awaited at once.
- Asynchronous copies between memories have their own lane. The bandwidth that they take
  from overlapped instructions is ignored.

These are the shortest times that the schedule allows; instructions have no overhead.
"""

import functools
import math
from collections import defaultdict
from dataclasses import dataclass

from jax.sharding import Mesh

from train.plan.compiled.attribution import part_of, scope
from train.plan.compiled.collectives import KINDS, Collective, started
from train.plan.compiled.flops import (
    computed_flops,
    has_eight_bits,
    kernel_flops,
    product_flops,
)
from train.plan.compiled.hbm_bytes import memory_bytes
from train.plan.compiled.hlo import Computation, Executed, Instruction, Loop, Module
from train.plan.rates import Rates
from train.units import format_bytes, format_flops

COMPUTE, COPIES = "compute", "copies between memories"  # lanes other than networks
PRODUCT, ATTENTION, MEMORY, WAIT = "product", "attention", "memory", "wait"
_HOST = ("send", "recv", "send-done", "recv-done")


@dataclass(frozen=True)
class Span:
    """Something that takes time. `kind` is one of the above or of a collective."""

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
    trips: of the loop in one run of it.
    spans: by their starts; those of a lane do not overlap.
    """

    name: str
    trips: int
    spans: list[Span]

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return max((s.start_s + s.seconds for s in self.spans), default=0.0)

    def busy(self, *kinds: str) -> float:
        """Add up the seconds of some kinds."""
        return sum(span.seconds for span in self.spans if span.kind in kinds)


def layer_timelines(module: Module, mesh: Mesh, rates: Rates) -> list[Timeline]:
    """Lay out a layer's forward and backward pass; empty if no loop runs layers."""
    timelines = []
    for name, loop in layer_loops(module).items():
        device = _Device(module, mesh, rates)
        device.run(loop.body)
        spans = sorted(device.finish(), key=lambda span: span.start_s)
        timelines.append(Timeline(name, loop.trips, spans))
    return timelines


def layer_loops(module: Module) -> dict[str, Loop]:
    """Find the loops over layers, `forward` and `backward`; not the loops in them."""
    loops_of_pass = dict[str, list[Loop]]()
    for executed in module.executed:
        if executed.instruction.opcode != "while":
            continue
        loop = executed.instruction.loop
        inner_bodies = [
            inner.body for loops in loops_of_pass.values() for inner in loops
        ]
        if any(outer.body in inner_bodies for outer in executed.loops):
            continue
        loops = (*executed.loops, loop)
        inside = Executed(loop.instruction, executed.times, loops)
        kind, _, way = scope(inside, loop.instruction).partition(" ")
        if kind == "layers" and way:
            loops_of_pass.setdefault(way, []).append(loop)

    def flops(loop: Loop) -> float:
        return loop.trips * computed_flops(loop.body.order)

    return {
        way: max(loops_of_pass[way], key=flops)
        for way in sorted(loops_of_pass, reverse=True)
    }


@dataclass(frozen=True)
class _Cost:
    """The work of an instruction. `copied`: the instruction that awaits its copy."""

    kind: str
    seconds: float
    label: str
    detail: str
    collectives: tuple[Collective, ...] = ()
    copied: str = ""


class _Device:
    """Runs computations against the clock, and notes what takes time."""

    def __init__(self, module: Module, mesh: Mesh, rates: Rates):
        self._mesh, self._rates = mesh, rates
        self._now = 0.0
        self._free = dict[str, float]()  # lane -> when it is free
        self._pending = dict[
            str, tuple[float, str]
        ]()  # waiting instruction -> end, label
        self._spans = list[Span]()
        self._bodies = defaultdict[Computation, list[Executed]](list)
        for executed in module.executed:
            self._bodies[executed.instruction.within].append(executed)
        self._cost_of = functools.cache(self._cost)

    def finish(self) -> list[Span]:
        """Complete pending asynchronous operations and return all spans."""
        for name in sorted(self._pending, key=lambda name: self._pending[name]):
            self._wait(name)
        return [span for span in self._spans if span.seconds > 0]

    def run(self, computation: Computation) -> None:
        """Run a computation once."""
        for executed in self._bodies[computation]:
            instruction = executed.instruction
            if instruction.name in self._pending:
                self._wait(instruction.name)
            if instruction.opcode == "while":
                for _ in range(instruction.loop.trips):
                    self.run(instruction.body)
            elif instruction.opcode in ("call", "conditional"):
                # The branch that is taken most often represents all.
                self.run(max(instruction.called, key=self._times))
            else:
                self._step(instruction, self._cost_of(executed))

    def _times(self, called: Computation) -> int:
        return max((executed.times for executed in self._bodies[called]), default=0)

    def _step(self, instruction: Instruction, cost: _Cost) -> None:
        def book(lane: str) -> float:
            return self._book(lane, cost.kind, cost.seconds, cost.label, cost.detail)

        if cost.copied:
            self._expect(cost.copied, book(COPIES), cost.label)
            return
        sent = [(c, self._send(c)) for c in cost.collectives]
        if cost.seconds:
            self._now = book(COMPUTE)
        for collective, end in sent:
            until = collective.until if collective.is_async else instruction.name
            self._expect(until, end, _sent_label(collective))
            if not collective.is_async:
                self._wait(until)

    def _send(self, sent: Collective) -> float:
        group = sent.group
        axes = " and ".join(group.axes) or "no axis"
        seconds = sent.sent / self._rates.send(group)
        detail = (
            f"{sent.name}: {format_bytes(sent.sent)} sent of "
            f"{format_bytes(sent.payload)}, by each of {group.size}"
        )
        lane = f"{group.network}: {axes}"
        return self._book(lane, sent.kind, seconds, _sent_label(sent), detail)

    def _expect(self, until: str, end: float, label: str) -> None:
        self._pending[until] = max((end, label), self._pending.get(until, (0.0, "")))

    def _book(
        self, lane: str, kind: str, seconds: float, label: str, detail: str
    ) -> float:
        """Note what takes a lane as soon as it is free, and give its end."""
        start = max(self._now, self._free.get(lane, 0.0))
        self._spans.append(
            Span(lane, kind, start_s=start, seconds=seconds, label=label, detail=detail)
        )
        self._free[lane] = start + seconds
        return start + seconds

    def _wait(self, name: str) -> None:
        end, label = self._pending.pop(name)
        if end > self._now:
            self._book(COMPUTE, WAIT, end - self._now, f"waits for {label}", "")
            self._now = self._free[COMPUTE] = end

    def _cost(self, executed: Executed) -> _Cost:
        instruction, sent = executed.instruction, tuple(started(executed, self._mesh))
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in KINDS or opcode in _HOST:
            return _Cost(MEMORY, 0.0, "", "", sent)
        products = attention = busy = 0.0
        for inner in instruction.parts:
            product, rate = product_flops(inner), self._rates.flops
            if product and has_eight_bits(inner):
                rate = self._rates.eight_bits
            products, busy = products + product, busy + product / rate
            if inner.opcode == "custom-call":
                attention += math.prod(kernel_flops(inner))
        hbm_bytes = memory_bytes(instruction)
        flops = products + attention
        busy += attention / self._rates.flops
        seconds = max(busy, hbm_bytes / self._rates.memory)
        kind = ATTENTION if attention else PRODUCT if products else MEMORY
        done = [u.name for u in instruction.users if u.opcode.endswith("-done")]
        copied = done[0] if opcode.endswith("-start") and seconds and done else ""
        work = f"{format_flops(flops)}, " if flops else ""
        detail = f"{instruction.name}: {work}{format_bytes(hbm_bytes)}"
        label = "attention" if attention else _label(instruction)
        return _Cost(
            kind, seconds, label=label, detail=detail, collectives=sent, copied=copied
        )


def _sent_label(sent: Collective) -> str:
    uses = dict.fromkeys(use for use, _ in sent.serves if use != "scalars")
    return f"{sent.kind} {', '.join(uses) or 'scalars'}"


def _label(instruction: Instruction) -> str:
    name = instruction.op_name
    name_shown = part_of(name) or name.rpartition("/")[2] or instruction.opcode
    return name_shown + (", again" if "rematted_computation" in name else "")
