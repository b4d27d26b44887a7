"""A drill is a function that does something to a run and reports what happened."""

import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.drills.ground import Ground


class NotRun(Exception):
    """Raised by a drill that needs something that this machine does not permit."""


class Drill(NamedTuple):
    """A drill; its function raises an AssertionError if a promise does not hold.

    number: The fault's number in the list of faults, or a name.
    promise: The promise that the drill checks, if every change must pass the drill.
    """

    number: int | str
    act: Callable[[Ground], str]
    promise: str | None = None

    @property
    def name(self) -> str:
        return self.act.__name__.replace("_", " ")

    @property
    def done_and_expected(self) -> tuple[str, str]:
        done, _, expected = " ".join((self.act.__doc__ or "").split()).partition(" -> ")
        return done, expected


class Outcome(NamedTuple):
    """The outcome of a drill; `held` is None if the drill could not run."""

    drill: Drill
    held: bool | None
    seen: str
    seconds: float

    @property
    def verdict(self) -> str:
        return {True: "held", False: "FAILED", None: "not run"}[self.held]


def drill(number: int | str, promise: str | None = None) -> Callable[..., Drill]:
    """Return a decorator that makes a drill of a function.

    The docstring of the function reads `what is done -> what is expected`.
    """
    return lambda act: Drill(number, act, promise)


def carry_out(drill: Drill, ground: Ground) -> Outcome:
    """Carry out a drill in a folder of its own, which is kept if the drill fails."""
    began = time.monotonic()
    holds = False
    with ground.place_of(f"{drill.number}-{drill.act.__name__}") as drill_ground:
        try:
            report = drill.act(drill_ground)
            drill_ground.check_nothing_is_left()
            holds = True
        except NotRun as reason:
            holds = None
            report = str(reason)
        except AssertionError as failure:
            report = str(failure) or traceback.format_exc(limit=-2)
        except Exception:
            report = traceback.format_exc()
        drill_ground.keep = holds is False
    return Outcome(drill, holds, report, time.monotonic() - began)


def expect(subject: str, actual: Any, expected: Any) -> None:
    """Raise an AssertionError if a value differs from the promised one."""
    assert actual == expected, f"{subject}: {actual}, expected {expected}"
