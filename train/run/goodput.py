"""Account for the wall time of a run, from its events.

The laps of each start follow each other from the beginning of its process, and `idle`
lies between starts, so the sum of the seconds is the wall time by construction. Time
that is missing nevertheless (a suspended machine, starts of earlier versions) is
`other`. Goodput is the fraction of the wall time spent on steps whose result is in the
model, and not on steps that a later start repeated.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from train.units import format_seconds

BUCKETS = {  # in the order of a start; what people read
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
_BUCKET_OF = {event: event for event in BUCKETS if event not in ("wasted", "other")}
_BUCKET_OF["compile"] = "prepare"
_SLACK = 1e-3  # how far two clocks of a host may drift apart, as a fraction of a start


@dataclass(frozen=True)
class Start:
    """One start of a run.

    idle_s: between the start before and this one.
    buckets: seconds, without `idle`; those with none are left out.
    first_step: completed updates of the state it went on from; None: never came there.
    last_step: completed updates at its last record.
    num_wasted: steps that a later start did again.
    code: exit code; None: it was killed, or still runs.
    ended: unix seconds at its last record.
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
        """How long it took."""
        return sum(self.buckets.values())


@dataclass(frozen=True)
class Goodput:
    """The accounted time of all starts of a run."""

    starts: list[Start]

    @property
    def buckets(self) -> dict[str, float]:
        """Seconds, in the order of BUCKETS; those with none are left out."""
        sums = {
            name: math.fsum(start.buckets.get(name, 0.0) for start in self.starts)
            for name in BUCKETS
        }
        sums["idle"] = math.fsum(start.idle_s for start in self.starts)
        return {name: seconds for name, seconds in sums.items() if seconds > 0}

    @property
    def wall_s(self) -> float:
        """The seconds from the beginning of the first start to the last lap's end."""
        return sum(self.buckets.values())

    @property
    def fraction(self) -> float:
        """Share of the wall time that went to steps that count."""
        return self.buckets.get("step", 0.0) / self.wall_s if self.wall_s else 0.0

    @property
    def num_wasted(self) -> int:
        """Steps that a later start did again."""
        return round(sum(start.num_wasted for start in self.starts))

    def __str__(self) -> str:
        """Format it as two lines, the largest buckets first."""
        starts = f"{len(self.starts)} start{'s' * (len(self.starts) != 1)}"
        again = f", {self.num_wasted:,} steps done again" if self.num_wasted else ""
        shares = sorted(self.buckets.items(), key=lambda item: -item[1])
        parts = [
            f"{BUCKETS[name]} {seconds / self.wall_s:.1%}"
            for name, seconds in shares
            if seconds >= 0.0005 * self.wall_s
        ]
        took = f"{self.fraction:.1%} of {format_seconds(self.wall_s)} in {starts}"
        return f"{took}{again}\n{', '.join(parts)}"


def account(events: Iterable[dict[str, Any]]) -> Goodput:
    """Account for a run's events, in the order in which they were recorded.

    Events with other names, and lines that are not what an event is, count for nothing.
    """
    by_start: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        number, seconds = event.get("start"), event.get("seconds")
        times = finite(event.get("time")), finite(seconds)
        if isinstance(number, int) and None not in times:
            by_start.setdefault(number, []).append(event)
    starts, again_from = list[Start](), math.inf
    for number in sorted(by_start, reverse=True):
        start = _start(number, by_start[number], again_from)
        if start.first_step is not None:
            again_from = min(again_from, start.first_step)
        starts.append(start)
    return Goodput(starts[::-1])


def _start(number: int, events: Sequence[dict[str, Any]], again_from: float) -> Start:
    """Account for one start; steps after `again_from` were done again."""
    buckets = dict.fromkeys(BUCKETS, 0.0)
    first = step = code = None
    num_wasted = 0.0
    for event in events:
        name, seconds = event.get("event"), event["seconds"]
        if bucket := _BUCKET_OF.get(str(name)):
            buckets[bucket] += seconds
        if name == "restore" and isinstance(event.get("step"), int):
            first = step = event["step"]
        elif name == "step" and (num_steps := event.get("steps")):
            step = event.get("step", (step or 0) + num_steps)
            lost = min(num_steps, max(0.0, step - again_from))
            buckets["wasted"] += seconds * lost / num_steps
            buckets["step"] -= seconds * lost / num_steps
            num_wasted += lost
        elif name == "end":
            code = event.get("code")
    idle_s = buckets.pop("idle")
    laps = [event for event in events if event.get("event") != "idle"]
    began = min((e["time"] - e["seconds"] for e in laps), default=0.0)
    ended = max((e["time"] for e in laps), default=events[-1]["time"])
    # Time after the last lap is idle, whatever instants it contains.
    lapped = max((e["time"] for e in laps if e["seconds"]), default=began)
    missing_s = lapped - began - sum(buckets.values())
    if missing_s > _SLACK * (lapped - began):
        buckets["other"] = missing_s
    buckets = {name: seconds for name, seconds in buckets.items() if seconds > 0}
    return Start(
        number,
        idle_s,
        buckets=buckets,
        first_step=first,
        last_step=step,
        num_wasted=num_wasted,
        code=code,
        ended=ended,
    )


def finite(value: object) -> float | None:
    """Return what is a finite number as a float; None for anything else."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
