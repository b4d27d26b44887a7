"""What a device did, and when: a trace of jax.profiler, as it lies in `.xplane.pb`.

A CPU's instructions are events of the threads that run them, and tell their device; one
that is shared out to other threads ends with an event of its own. GPUs and TPUs have a
plane each. Of several things that a device does at once the one counts that is worth
most: products before collectives, and of nested ones the innermost.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

from train.run.profiles import MARK

_OPS = "XLA Ops"  # of a TPU; its other lines say the same once more
_END = "end: "


class Event(NamedTuple):
    """An instruction of a program at work, from `begin` to `end` (nanoseconds)."""

    begin: float
    end: float
    instruction: str
    program: str


class Trace(NamedTuple):
    """The traced steps of one process: when, and the events of each device."""

    begin: float
    end: float
    devices: dict[str, list[Event]]


def read_trace(file: Path) -> Trace:
    """Read a trace.

    Raises:
        ValueError: the mark around the steps is not in it.
    """
    devices, ends = defaultdict[str, list[Event]](list), defaultdict[str, list](list)
    mark: tuple[float, float] | None = None
    data = ProfileData.from_file(str(file))  # planes and events point into it
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
    return Trace(*mark, {name: _ended(own, ends) for name, own in devices.items()})


def _ended(events: list[Event], ends: dict[str, list[float]]) -> list[Event]:
    """Let events that go on in other threads last until their ends."""
    later = {name: sorted(times) for name, times in ends.items()}
    next_ends, result = Counter[str](), list[Event]()
    for event in sorted(events):
        times, number = later.get(event.instruction, ()), next_ends[event.instruction]
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
    """Share a stretch of time out among events: each moment to one, or to none.

    Args:
        events: of a device.
        begin: of the stretch.
        end: of the stretch.
        rank: of several at once the one with the lowest counts; then the latest.

    Returns:
        Nanoseconds by event; None is the time without any.
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

    for event in sorted(_within(events, begin, end)):
        now = pass_time(max(event.begin, begin), now)
        heapq.heappush(active, (rank(event), -event.begin, min(event.end, end), event))
    pass_time(end, now)
    return spent


def _within(events: Sequence[Event], begin: float, end: float) -> Iterable[Event]:
    return (event for event in events if event.begin < end and begin < event.end)
