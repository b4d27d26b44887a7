"""Exit codes: what the end of a process means to whoever would start it again.

A launcher starts a run again after PREEMPTED, OWNED (once the owner is gone), ABORTED
and, up to a limit, any code that is not here; it does not after the others.
"""

FINISHED = 0
CRASHED = 1  # for no reason that is known here: it may help to start again
DIVERGED = 3
DOES_NOT_FIT = 4
PREEMPTED = 42
WRONG_DATA = 65
CRASHES_AGAIN = 70  # three times at the same step
OWNED = 75  # a live process owns the run
WRONG_CONFIG = 78
STOPPED = 130  # by a person
ABORTED = 134  # by a watchdog, or because a process was lost


class Exit(Exception):
    """Ends the program with a code and a message for people, without a traceback."""

    def __init__(self, code: int, message: str):
        self.code = code
        super().__init__(message)


def meaning(code: int | None) -> str:
    """Say how a start ended; None: it was killed, or still runs."""
    known = {
        None: "unknown, left no exit code",
        FINISHED: "finished",
        DIVERGED: "diverged",
        PREEMPTED: "preempted",
        WRONG_DATA: "data missing or damaged",
        CRASHES_AGAIN: "crashed at one step again and again",
        OWNED: "another process owns the run",
        WRONG_CONFIG: "wrong config",
        STOPPED: "interrupted by a person",
        ABORTED: "aborted",
    }
    return known.get(code, f"crashed, exit code {code}")
