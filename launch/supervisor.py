"""Keeps a run going from here: starts it, and again, until it is done or of no use.

For clusters that do not do so themselves. Preemptions and lost hosts do not count;
crashes do, with a growing pause, up to a limit, and never three at the same step. A
signal to stop goes on to the run, which saves, and ends this too.
"""

import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launch.job import Job
from launch.policy import SAME_STEP, Verdict, judge, pause_after_crash
from launch.subprocesses import run_module
from train.errors import CRASHES_AGAIN, OWNED, PREEMPTED, STOPPED

log = logging.getLogger(__name__)

_PAUSE_S = 1.0  # after what is not counted
_OWNED_PAUSE_S = 15.0  # another process is at it: it may leave, or die
ATTEMPTS = "attempts.jsonl"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # to stop


class Attempt(Protocol):
    """One start of all processes of a run."""

    def wait(self) -> Sequence[int | None]:
        """Wait for their ends; return exit codes, None for a lost host."""
        ...

    def stop(self, number: int) -> None:
        """Pass a signal on; called from a handler, while another thread waits."""
        ...


@dataclass
class Supervisor:
    """The attempts at a run.

    start: begins one.
    step: returns the newest step of the run, None if it has none or cannot be asked.
    diary: file that gets a JSON line for each attempt.
    """

    start: Callable[[], Attempt]
    step: Callable[[], int | None]
    max_restarts: int
    backoff_s: float
    diary: Path

    def __post_init__(self) -> None:
        """Begin without a signal and without a crash."""
        self._asked: int | None = None
        self._attempt: Attempt | None = None
        self._crashed_at: list[int | None] = []

    def run(self) -> int:
        """Go on to the end; return the exit code that says what it was."""
        before = {number: signal.signal(number, self._stop) for number in SIGNALS}
        try:
            while (code := self._once()) is None:
                pass
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _once(self) -> int | None:
        """Make one attempt; return an exit code if it was the last."""
        if self._asked is not None:  # in the pause
            return STOPPED if self._asked == signal.SIGINT else PREEMPTED
        began = time.time()
        self._attempt = self.start()
        if self._asked is not None:  # while it started
            self._attempt.stop(self._asked)
        codes = list(self._attempt.wait())
        self._attempt = None
        verdict, code = judge(codes)
        last = self._last(verdict, code)
        line = {"began": began, "ended": time.time(), "codes": codes}
        line |= {"verdict": verdict, "over": last is not None}
        with self.diary.open("a") as diary:
            diary.write(json.dumps(line) + "\n")
        return last

    def _last(self, verdict: Verdict, code: int) -> int | None:
        """Return the exit code if this end is the last; else wait as long as is due."""
        if verdict in (Verdict.done, Verdict.stop) or self._asked is not None:
            return code
        if verdict is Verdict.again:
            log.info("ended with %d; again, this does not count", code)
            self._pause(_OWNED_PAUSE_S if code == OWNED else _PAUSE_S)
            return None
        self._crashed_at.append(self.step())
        crashes, at = len(self._crashed_at), self._crashed_at[-SAME_STEP:]
        if crashes >= SAME_STEP and at[0] is not None and len({*at}) == 1:
            log.error("crashed %d times at step %d: not again", SAME_STEP, at[0])
            return CRASHES_AGAIN
        pause_s = pause_after_crash(code, crashes, self.max_restarts, self.backoff_s)
        if pause_s is None:
            return code
        self._pause(pause_s)
        return None

    def _pause(self, seconds: float) -> None:
        """Wait, unless a signal comes; its handler must not need a lock of ours."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and self._asked is None:
            time.sleep(min(left, 0.1))

    def _stop(self, number: int, frame: object) -> None:
        self._asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        log.info("%s: the run is asked to save and stop", signal.Signals(number).name)
        if self._attempt is not None:
            self._attempt.stop(self._asked)


def run_step(job: Job) -> int | None:
    """Return the newest step of the run; None if it cannot be asked."""
    asked = run_module("train.status", job.status_arguments, capture_output=True)
    return json.loads(asked.stdout)["step"] if asked.returncode == 0 else None


def describe_attempts(diary: Path) -> list[str]:
    """Return a line for each attempt so far: how it ended."""
    lines = diary.read_text().splitlines() if diary.exists() else []
    said = []
    for number, line in enumerate(map(json.loads, lines), start=1):
        codes = ", ".join("lost" if c is None else str(c) for c in line["codes"])
        took = line["ended"] - line["began"]
        last = "the last" if line["over"] else "again"
        said.append(f"attempt {number}   {took:.0f} s, exit codes {codes}: {last}")
    return said
