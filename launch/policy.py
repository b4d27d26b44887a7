"""Decide after an attempt whether the run is over, starts again, or has crashed.

The exit codes are those of train/errors.py. The job script of Slurm and the policies of
JobSet state the same rules in their own languages, and tests compare them.
"""

import logging
from collections.abc import Sequence
from enum import StrEnum

from train import errors
from train.errors import ABORTED, FINISHED

log = logging.getLogger(__name__)

# Another start would end in the same way, or is not wanted; the first found counts.
NEVER_AGAIN = (errors.STOPPED, errors.WRONG_CONFIG, errors.DOES_NOT_FIT)
NEVER_AGAIN += (errors.WRONG_DATA, errors.DIVERGED, errors.CRASHES_AGAIN)
AGAIN = (errors.PREEMPTED, ABORTED, errors.OWNED)  # these do not count as crashes
SAME_STEP = 3  # after this many crashes at one step another start would not help
LONGEST_BACKOFF_S = 600.0
OTHERS_S = 600.0  # after one has ended: heartbeat, watchdog and a save are within it


class Verdict(StrEnum):
    """The decision after an attempt."""

    done = "done"
    stop = "stop"
    again = "again"
    crashed = "crashed"  # again, if there were not too many


def judge(codes: Sequence[int | None]) -> tuple[Verdict, int]:
    """Return what the exit codes of all processes mean, and which of them says it.

    Args:
        codes: as a shell sees them, 137 for kill -9; None: its host was lost.
    """
    for code in NEVER_AGAIN:
        if code in codes:
            return Verdict.stop, code
    crashes = [c for c in codes if c not in (None, FINISHED, *AGAIN)]
    if crashes:
        return Verdict.crashed, crashes[0] or 0
    failures = [code for code in codes if code]
    if failures or None in codes:
        return Verdict.again, failures[0] if failures else ABORTED
    return Verdict.done, FINISHED


def backoff(crashes: int, first_s: float) -> float:
    """Return the seconds to wait after this number of crashes."""
    return min(first_s * 2 ** (crashes - 1), LONGEST_BACKOFF_S)


def pause_after_crash(
    code: int, crashes: int, max_restarts: int, first_s: float
) -> float | None:
    """Return the seconds to wait before the next start; None: there is none.

    `crashes` counts this one too.
    """
    crash = f"crashed with {code} ({crashes} of {max_restarts})"
    if crashes > max_restarts:
        log.error("%s: not again (cluster.max_restarts)", crash)
        return None
    pause_s = backoff(crashes, first_s)
    log.warning("%s; again in %.0f s", crash, pause_s)
    return pause_s
