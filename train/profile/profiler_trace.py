"""Read a trace of jax.profiler (`.xplane.pb`): what each device did, and when.

On a CPU, instructions are events of the threads that run them and name their device. An
instruction that other threads help with ends with an event of its own. GPUs and TPUs
have one plane for each device. If a device does several things at once, the time
belongs to the most useful one: products before collectives, and the innermost of nested
instructions.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

from train.run.profiles import MARK

_OPS = "XLA Ops"  # A TPU's other lines repeat the same time.
_END = "end: "


class Event(NamedTuple):
    """One execution of an instruction, from `begin` to `end` in nanoseconds."""

    begin: float
    end: float
    instruction: str
    program: str


class Trace(NamedTuple):
    """The traced steps of one process: their time and the events of each device."""

    begin: float
    end: float
    devices: dict[str, list[Event]]


def read_trace(file: Path) -> Trace:
    """Read a trace.

    Raises:
        ValueError: if the mark around the steps is missing.
    """
    devices, ends = defaultdict[str, list[Event]](list), defaultdict[str, list](list)
    mark: tuple[float, float] | None = None
    data = ProfileData.from_file(str(file))  # Planes and events point into it.
    for plane in data.planes:
        lines = list(plane.lines)
        on_device = plane.name.startswith("/device:")
        if on_device and any(line.name == _OPS for line in lines):
            lines = [line for line in lines if line.name == _OPS]
        for line in lines:
            for event in line.events:
                begin, end = event.start_ns, event.start_ns + event.duration_ns
                if event.name == MARK:
                    mark = begin, end
                elif event.name.startswith(_END):
                    ends[event.name.removeprefix(_END)].append(end)
                elif on_device or not event.name.startswith("$"):
                    stats = dict(event.stats)
                    name = stats.get("hlo_op") or (line.name == _OPS and event.name)
                    if name:
                        device = plane.name
                        if not on_device:
                            device = f"{device}:{stats.get('device_ordinal', 0)}"
                        name = str(name).removeprefix("%").split(" ")[0]
                        program = str(stats.get("hlo_module", ""))
                        devices[device].append(Event(begin, end, name, program))
    if mark is None:
        raise ValueError(f"{file}: these are not the steps of a run")
    begin, end = mark
    extended = {name: extend_events(events, ends) for name, events in devices.items()}
    return Trace(begin, end, extended)


def extend_events(events: list[Event], ends: dict[str, list[float]]) -> list[Event]:
    """Extend events that other threads help with to their ends."""
    sorted_ends = {name: sorted(times) for name, times in ends.items()}
    next_ends, result = Counter[str](), list[Event]()
    for event in sorted(events):
        times = sorted_ends.get(event.instruction, ())
        number = next_ends[event.instruction]
        while number < len(times) and times[number] < event.begin:
            number += 1
        if number < len(times):
            event = event._replace(end=max(event.end, times[number]))
        next_ends[event.instruction] = number + 1
        result.append(event)
    return result


def time_spent(
    events: Sequence[Event], begin: float, end: float, rank: Callable[[Event], int]
) -> dict[Event | None, float]:
    """Divide a span of time among events, each moment to at most one event.

    At each moment the event with the lowest rank counts, and among equal ones the one
    that began last.

    Returns:
        Nanoseconds by event. None stands for time without an event.
    """
    spent, now = defaultdict[Event | None, float](float), begin
    active: list[tuple[int, float, float, Event]] = []

    def pass_time(until: float, now: float) -> float:
        while active and now < until:
            _, _, stop, event = active[0]
            if stop <= now:
                heapq.heappop(active)
                continue
            spent[event] += min(stop, until) - now
            now = min(stop, until)
        if now < until:
            spent[None] += until - now
        return max(now, until)

    for event in sorted(e for e in events if e.begin < end and begin < e.end):
        now = pass_time(max(event.begin, begin), now)
        heapq.heappush(active, (rank(event), -event.begin, min(event.end, end), event))
    pass_time(end, now)
    return spent
