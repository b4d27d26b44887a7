"""One layer on the clock: what a device computes, sends and waits for, and when.

The layer is one trip of the loop over layers in a compiled step, laid out in the order
in which XLA scheduled its instructions. The model:

- A device runs one instruction after the other. Each takes as long as its FLOPs or its
  bytes from and to main memory, whichever is longer, at the rates given.
- A collective takes the bytes that a device sends at the rate of its group. Collectives
  of the same network and the same mesh axes run one after the other.
- What is asynchronous starts when its lane is free, and the instruction that needs it
  waits for its end; anything else is waited for at once.
- Asynchronous copies between memories have a lane of their own; that they take
  bandwidth from the instructions beside them is left out.

So these are the shortest times that the schedule allows; no instruction has overhead.
"""

import functools
from collections import defaultdict
from dataclasses import dataclass

from jax.sharding import Mesh

from train.plan.compiled.attribution import part_in_name, scope_of
from train.plan.compiled.collectives import KINDS, Collective, started_collectives
from train.plan.compiled.flops import (
    attention_kernel_flops,
    computed_flops,
    has_eight_bits,
    product_flops,
)
from train.plan.compiled.hbm_bytes import memory_traffic
from train.plan.compiled.hlo import Computation, Executed, Instruction, Loop, Module
from train.plan.rates import Rates
from train.units import format_bytes, format_flops

COMPUTE, COPIES = "compute", "copies between memories"  # lanes beside the networks
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
    found = dict[str, list[Loop]]()
    for executed in module.executed:
        if executed.instruction.opcode != "while":
            continue
        loop = executed.instruction.loop
        known = [inner.body for loops in found.values() for inner in loops]
        if any(outer.body in known for outer in executed.loops):
            continue
        loops = (*executed.loops, loop)
        inside = Executed(loop.instruction, executed.times, loops)
        what, _, way = scope_of(inside, loop.instruction).partition(" ")
        if what == "layers" and way:
            found.setdefault(way, []).append(loop)

    def flops(loop: Loop) -> float:
        return loop.trips * computed_flops(loop.body.order)

    return {way: max(found[way], key=flops) for way in sorted(found, reverse=True)}


@dataclass(frozen=True)
class _Cost:
    """What an instruction does. `copied`: who awaits the copy that it only starts."""

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
        self._free = dict[str, float]()  # by lane: when it is
        self._pending = dict[str, tuple[float, str]]()  # by who waits: end, for what
        self._spans = list[Span]()
        self._bodies = defaultdict[Computation, list[Executed]](list)
        for executed in module.executed:
            self._bodies[executed.instruction.computation].append(executed)
        self._cost_of = functools.cache(self._cost)

    def finish(self) -> list[Span]:
        """Wait for what nobody waited for, and give all that took time."""
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
                # Of branches the one that is taken most often.
                self.run(max(instruction.called, key=self._times))
            else:
                self._step(instruction, self._cost_of(executed))

    def _times(self, called: Computation) -> int:
        return max((executed.times for executed in self._bodies[called]), default=0)

    def _step(self, instruction: Instruction, cost: _Cost) -> None:
        work = (cost.kind, cost.seconds, cost.label, cost.detail)
        if cost.copied:
            self._expect(cost.copied, self._book(COPIES, *work), cost.label)
            return
        sent = [(c, self._send(c)) for c in cost.collectives]
        if cost.seconds:
            self._now = self._book(COMPUTE, *work)
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
        self._spans.append(Span(lane, kind, start, seconds, label, detail))
        self._free[lane] = start + seconds
        return start + seconds

    def _wait(self, name: str) -> None:
        end, label = self._pending.pop(name)
        if end > self._now:
            self._book(COMPUTE, WAIT, end - self._now, f"waits for {label}", "")
            self._now = self._free[COMPUTE] = end

    def _cost(self, executed: Executed) -> _Cost:
        instruction, sent = (
            executed.instruction,
            tuple(started_collectives(executed, self._mesh)),
        )
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in KINDS or opcode in _HOST:
            return _Cost(MEMORY, 0.0, "", "", sent)
        products = attention = busy = 0.0
        for inner in instruction.with_nested:
            product, rate = product_flops(inner), self._rates.flops
            if product and has_eight_bits(inner):
                rate = self._rates.eight_bits
            products, busy = products + product, busy + product / rate
            if inner.opcode == "custom-call":
                attention += attention_kernel_flops(inner).computed
        moved = memory_traffic(instruction)
        flops = products + attention
        busy += attention / self._rates.flops
        seconds = max(busy, moved / self._rates.memory)
        kind = ATTENTION if attention else PRODUCT if products else MEMORY
        done = [u.name for u in instruction.users if u.opcode.endswith("-done")]
        copied = done[0] if opcode.endswith("-start") and seconds and done else ""
        work = f"{format_flops(flops)}, " if flops else ""
        detail = f"{instruction.name}: {work}{format_bytes(moved)}"
        label = "attention" if attention else _label(instruction)
        return _Cost(kind, seconds, label, detail, sent, copied)


def _sent_label(sent: Collective) -> str:
    uses = dict.fromkeys(use for use, _ in sent.serves if use != "scalars")
    return f"{sent.kind} {', '.join(uses) or 'scalars'}"


def _label(instruction: Instruction) -> str:
    name = instruction.op_name
    said = part_in_name(name) or name.rpartition("/")[2] or instruction.opcode
    return said + (", again" if "rematted_computation" in name else "")
