"""Account for the wall time of a run, from its events.

A lap is an event with a duration. The laps of a start follow each other from the
beginning of its process, and `idle` spans the time between starts, so the seconds add
up to the wall time. Time that no lap covers, such as that of a suspended machine, is
`other`. Goodput is the share of the wall time that went to steps that no later start
repeated.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from train.units import format_seconds

BUCKETS = {  # in the order of a start, with display names
    "idle": "idle between starts",
    "start": "program start",
    "init": "accelerator init",
    "prepare": "preparation",
    "restore": "restore",
    "step": "steps",
    "wasted": "steps done again",
    "data_wait": "data wait",
    "eval": "evaluation",
    "save": "blocking save",
    "check": "comparing copies",
    "profile": "profiles",
    "close": "end of a start",
    "other": "not recorded",
}
_EVENT_BUCKETS = {event: event for event in BUCKETS if event not in ("wasted", "other")}
_EVENT_BUCKETS["compile"] = "prepare"
_SLACK = 1e-3  # how far two clocks of a host may drift apart, per second of a start


@dataclass(frozen=True)
class StartAccount:
    """One start of a run.

    idle_s: the seconds between the previous start and this one.
    buckets: the seconds of each bucket except `idle`, without empty buckets.
    first_step: completed updates of the restored state; None before the restore.
    last_step: completed updates at its last record.
    num_wasted: the number of steps that a later start repeated.
    code: the exit code; None if the start was killed or still runs.
    ended: the Unix time of its last record.
    """

    number: int
    idle_s: float
    buckets: dict[str, float]
    first_step: int | None
    last_step: int | None
    num_wasted: float
    code: int | None
    ended: float

    @property
    def seconds(self) -> float:
        """The seconds from the start's beginning to its end."""
        return sum(self.buckets.values())


@dataclass(frozen=True)
class Goodput:
    """The wall time of all starts of a run."""

    starts: list[StartAccount]

    @property
    def buckets(self) -> dict[str, float]:
        """The seconds of each bucket in the order of BUCKETS, without empty buckets."""
        sums = {
            name: math.fsum(start.buckets.get(name, 0.0) for start in self.starts)
            for name in BUCKETS
        }
        sums["idle"] = math.fsum(start.idle_s for start in self.starts)
        return {name: seconds for name, seconds in sums.items() if seconds > 0}

    @property
    def wall_s(self) -> float:
        """The seconds between the beginning of the first start and the last lap."""
        return sum(self.buckets.values())

    @property
    def fraction(self) -> float:
        """The share of the wall time that went to steps that were not repeated."""
        return self.buckets.get("step", 0.0) / self.wall_s if self.wall_s else 0.0

    @property
    def num_wasted(self) -> int:
        """The number of steps that a later start repeated."""
        return round(sum(start.num_wasted for start in self.starts))

    def __str__(self) -> str:
        """Return two lines: a summary, and the share of each bucket, largest first."""
        starts = f"{len(self.starts)} start{'s' * (len(self.starts) != 1)}"
        repeated = f", {self.num_wasted:,} steps done again" if self.num_wasted else ""
        largest_first = sorted(self.buckets.items(), key=lambda item: -item[1])
        shares = [
            f"{BUCKETS[name]} {seconds / self.wall_s:.1%}"
            for name, seconds in largest_first
            if seconds >= 0.0005 * self.wall_s
        ]
        summary = f"{self.fraction:.1%} of {format_seconds(self.wall_s)} in {starts}"
        return f"{summary}{repeated}\n{', '.join(shares)}"


def goodput_of(events: Iterable[dict[str, Any]]) -> Goodput:
    """Return the goodput of a run from its events, in their recorded order.

    Events with other names and malformed lines are ignored.
    """
    events_by_start: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        times = finite_float(event.get("time")), finite_float(event.get("seconds"))
        if isinstance(number := event.get("start"), int) and None not in times:
            events_by_start.setdefault(number, []).append(event)
    starts = list[StartAccount]()
    repeated_after = math.inf
    for number in sorted(events_by_start, reverse=True):
        start = _account_for_start(number, events_by_start[number], repeated_after)
        if start.first_step is not None:
            repeated_after = min(repeated_after, start.first_step)
        starts.append(start)
    return Goodput(starts[::-1])


def _account_for_start(
    number: int, events: Sequence[dict[str, Any]], repeated_after: float
) -> StartAccount:
    """Account for one start; later starts repeated the steps after `repeated_after`."""
    buckets = dict.fromkeys(BUCKETS, 0.0)
    first_step = step = code = None
    num_wasted = 0.0
    for event in events:
        name = event.get("event")
        seconds = event["seconds"]
        if bucket := _EVENT_BUCKETS.get(str(name)):
            buckets[bucket] += seconds
        if name == "restore" and isinstance(event.get("step"), int):
            first_step = step = event["step"]
        elif name == "step" and (num_steps := event.get("steps")):
            step = event.get("step", (step or 0) + num_steps)
            num_repeated = min(num_steps, max(0.0, step - repeated_after))
            buckets["wasted"] += seconds * num_repeated / num_steps
            buckets["step"] -= seconds * num_repeated / num_steps
            num_wasted += num_repeated
        elif name == "end":
            code = event.get("code")
    idle_s = buckets.pop("idle")
    laps = [event for event in events if event.get("event") != "idle"]
    began = min((e["time"] - e["seconds"] for e in laps), default=0.0)
    ended = max((e["time"] for e in laps), default=events[-1]["time"])
    # The time after the last lap is idle, even if events without a duration follow.
    last_lap_end = max((e["time"] for e in laps if e["seconds"]), default=began)
    missing_s = last_lap_end - began - sum(buckets.values())
    if missing_s > _SLACK * (last_lap_end - began):
        buckets["other"] = missing_s
    buckets = {name: seconds for name, seconds in buckets.items() if seconds > 0}
    return StartAccount(
        number=number,
        idle_s=idle_s,
        buckets=buckets,
        first_step=first_step,
        last_step=step,
        num_wasted=num_wasted,
        code=code,
        ended=ended,
    )


def finite_float(value: object) -> float | None:
    """Return a finite number as a float, and None for anything else."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
