"""Decide after an attempt whether the run is over, starts again, or has crashed.

The exit codes are those of train/errors.py. slurm/attempt.sh states the same rules in
bash, and kubernetes/jobset.py as policies of JobSet. Tests compare both with this file.
"""

import logging
from collections.abc import Sequence
from enum import StrEnum

from train import errors

log = logging.getLogger(__name__)

# After these codes, another start would fail again or is not wanted. If processes ended
# with several of them, the first in this order is the run's exit code.
NO_RESTART_CODES = (errors.STOPPED, errors.WRONG_CONFIG, errors.DOES_NOT_FIT)
NO_RESTART_CODES += (errors.WRONG_DATA, errors.DIVERGED, errors.CRASHES_AGAIN)
NO_RESTART_CODES += (errors.NOT_PROVED,)
# Restarts after these codes are unlimited. All codes that are not listed are crashes,
# except FINISHED.
RESTART_CODES = (errors.PREEMPTED, errors.ABORTED, errors.OWNED)
SAME_STEP = 3  # the number of crashes in a row at one step that ends a run
LONGEST_BACKOFF_S = 600.0
# How long other processes may continue, for a last save, after one process has ended.
LAST_SAVE_S = 600.0


class Verdict(StrEnum):
    """The decision after an attempt."""

    done = "done"
    stop = "stop"  # the run is not finished, but does not start again
    again = "again"  # the run starts again, without limit
    crashed = "crashed"  # the run starts again, unless it has crashed too often


def judge(codes: Sequence[int | None]) -> tuple[Verdict, int]:
    """Return the verdict on the exit codes of all processes, and the decisive code.

    Args:
        codes: exit codes as in a shell (137 for kill -9); None for a lost host.
    """
    for code in NO_RESTART_CODES:
        if code in codes:
            return Verdict.stop, code
    crashes = [c for c in codes if c not in (None, errors.FINISHED, *RESTART_CODES)]
    if crashes:
        return Verdict.crashed, crashes[0] or 0
    failures = [code for code in codes if code]
    if failures or None in codes:
        return Verdict.again, failures[0] if failures else errors.ABORTED
    return Verdict.done, errors.FINISHED


def backoff(crashes: int, first_s: float) -> float:
    """Return the seconds to wait after the given number of crashes."""
    return min(first_s * 2 ** (crashes - 1), LONGEST_BACKOFF_S)


def pause_after_crash(
    code: int, crashes: int, max_restarts: int, first_s: float
) -> float | None:
    """Return the seconds to wait before the next start, or None for no further start.

    `crashes` includes the latest crash.
    """
    if crashes > max_restarts:
        limit = f"cluster.max_restarts={max_restarts}"
        log.error("crashed with %d, one time more than %s allows", code, limit)
        return None
    pause_s = backoff(crashes, first_s)
    count = f"{crashes} of {max_restarts}"
    log.warning("crashed with %d (%s): starting again in %.0f s", code, count, pause_s)
    return pause_s
