"""Read a trace of jax.profiler (`.xplane.pb`): what each device did, and when.

On a CPU, instructions are events of threads, and an event names its device. If several
threads share an instruction, a separate event marks its end. GPUs and TPUs have one
plane for each device. If instructions overlap on a device, their common time counts for
computation rather than for collectives or copies, and for the innermost of nested ones.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

from train.run.profiles import MARK

_OPS = "XLA Ops"  # The other trace lines of a TPU cover the same time again.
_END_PREFIX = "end: "


class Event(NamedTuple):
    """One execution of an instruction, from `begin` to `end` in nanoseconds."""

    begin: float
    end: float
    instruction: str
    program: str


class Trace(NamedTuple):
    """The traced steps of one process, in nanoseconds, and each device's events."""

    begin: float
    end: float
    devices: dict[str, list[Event]]


def read_trace(file: Path) -> Trace:
    """Read the trace of one process.

    Raises:
        ValueError: if the event that marks the traced steps is missing.
    """
    devices = defaultdict[str, list[Event]](list)
    ends = defaultdict[str, list](list)
    mark: tuple[float, float] | None = None
    data = ProfileData.from_file(str(file))  # It must outlive its planes and events.
    for plane in data.planes:
        lines = list(plane.lines)
        is_device = plane.name.startswith("/device:")
        if is_device and any(line.name == _OPS for line in lines):
            lines = [line for line in lines if line.name == _OPS]
        for line in lines:
            for event in line.events:
                begin = event.start_ns
                end = event.start_ns + event.duration_ns
                if event.name == MARK:
                    mark = begin, end
                elif event.name.startswith(_END_PREFIX):
                    ends[event.name.removeprefix(_END_PREFIX)].append(end)
                elif is_device or not event.name.startswith("$"):
                    stats = dict(event.stats)
                    name = stats.get("hlo_op") or (line.name == _OPS and event.name)
                    if name:
                        device = plane.name
                        if not is_device:
                            device = f"{device}:{stats.get('device_ordinal', 0)}"
                        name = str(name).removeprefix("%").split(" ")[0]
                        program = str(stats.get("hlo_module", ""))
                        devices[device].append(Event(begin, end, name, program))
    if mark is None:
        raise ValueError(f"{file}: has no event that marks the steps of a run")
    begin, end = mark
    extended = {name: extend_events(events, ends) for name, events in devices.items()}
    return Trace(begin, end, extended)


def extend_events(events: list[Event], ends: dict[str, list[float]]) -> list[Event]:
    """Sort events by begin, and extend each to its end event in `ends`, if any."""
    sorted_ends = {name: sorted(times) for name, times in ends.items()}
    next_index = Counter[str]()
    result = list[Event]()
    for event in sorted(events):
        event_ends = sorted_ends.get(event.instruction, ())
        index = next_index[event.instruction]
        while index < len(event_ends) and event_ends[index] < event.begin:
            index += 1
        if index < len(event_ends):
            event = event._replace(end=max(event.end, event_ends[index]))
        next_index[event.instruction] = index + 1
        result.append(event)
    return result


def attribute_time(
    events: Sequence[Event], begin: float, end: float, rank: Callable[[Event], int]
) -> dict[Event | None, float]:
    """Attribute the time from `begin` to `end` to events.

    Each moment counts for the active event of the lowest rank. Among events of equal
    rank, it counts for the latest to begin.

    Returns:
        Nanoseconds by event. None stands for time without an event.
    """
    spent = defaultdict[Event | None, float](float)
    time = begin
    active: list[tuple[int, float, float, Event]] = []

    def advance(until: float, time: float) -> float:
        while active and time < until:
            _, _, stop, event = active[0]
            if stop <= time:
                heapq.heappop(active)
                continue
            spent[event] += min(stop, until) - time
            time = min(stop, until)
        if time < until:
            spent[None] += until - time
        return max(time, until)

    for event in sorted(e for e in events if e.begin < end and begin < e.end):
        time = advance(max(event.begin, begin), time)
        heapq.heappush(active, (rank(event), -event.begin, min(event.end, end), event))
    advance(end, time)
    return spent
