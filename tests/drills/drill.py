"""What a drill is: a function that does something to a run, and says what it saw."""

import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.drills.ground import Ground


class NotRun(Exception):
    """Raised by a drill that needs what this machine does not permit."""


class Drill(NamedTuple):
    """A drill; its function raises an AssertionError if a promise does not hold.

    number: in the list of faults, or a name.
    promise: what it stands for among the drills that every change must pass.
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
    """What came of a drill. held: None if it could not be run."""

    drill: Drill
    held: bool | None
    seen: str
    seconds: float

    @property
    def verdict(self) -> str:
        return {True: "held", False: "FAILED", None: "not run"}[self.held]


def drill(number: int | str, promise: str | None = None) -> Callable[..., Drill]:
    """Make a drill of a function: its docstring says `what is done -> expected`."""
    return lambda act: Drill(number, act, promise)


def carry_out(drill: Drill, ground: Ground) -> Outcome:
    """Carry out a drill in a place of its own, which is kept if it failed."""
    began = time.monotonic()
    held = False
    with ground.place_of(f"{drill.number}-{drill.act.__name__}") as its:
        try:
            seen = drill.act(its)
            its.check_nothing_is_left()
            held = True
        except NotRun as why:
            held = None
            seen = str(why)
        except AssertionError as failure:
            seen = str(failure) or traceback.format_exc(limit=-2)
        except Exception:
            seen = traceback.format_exc()
        its.keep = held is False
    return Outcome(drill, held, seen, time.monotonic() - began)


def expect(what: str, seen: Any, wanted: Any) -> None:
    """Compare what was seen with what was promised."""
    assert seen == wanted, f"{what}: {seen}, expected {wanted}"
