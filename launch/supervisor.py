"""Supervise a run: restart it until it is finished or another start cannot help.

Restarts after preemptions and lost hosts are unlimited. Restarts after crashes follow
growing pauses, up to cluster.max_restarts. Three crashes in a row at the same step end
the run. The supervisor passes a signal to stop on to the run, and ends after the run
has saved and ended.
"""

import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from launch.job import Job
from launch.policy import SAME_STEP, Verdict, judge, pause_after_crash
from launch.subprocesses import run_module
from train.errors import CRASHES_AGAIN, OWNED, PREEMPTED, STOPPED

log = logging.getLogger(__name__)

_PAUSE_S = 1.0  # after an attempt that does not count as a crash
_OWNED_PAUSE_S = 15.0  # after OWNED, so that the other process may release the run
ATTEMPTS = "attempts.jsonl"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # each of these stops the run


class Wait:
    """Pauses until a signal or a timeout. Records the last signal, counts signals."""

    def __init__(self) -> None:
        self.last_signal: int | None = None
        self.count = 0

    def record(self, number: int) -> None:
        """Record a signal. A signal handler may call this, so it takes no lock."""
        self.last_signal = number
        self.count += 1

    def __call__(self, seconds: float, handled: int = 0) -> bool:
        """Wait at most `seconds`; return whether a signal has arrived, now or earlier.

        The wait ends early if more than `handled` signals have arrived in total.
        """
        deadline = time.monotonic() + seconds
        while (rest_s := deadline - time.monotonic()) > 0 and self.count <= handled:
            time.sleep(min(rest_s, 0.1))
        return self.last_signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a run that a signal stopped before its start."""
        return STOPPED if self.last_signal == signal.SIGINT else PREEMPTED


class Attempt(Protocol):
    """One start of all processes of a run."""

    def wait(self) -> Sequence[int | None]:
        """Wait for the end of all processes; return exit codes (None: process lost)."""
        ...

    def stop(self, number: int) -> None:
        """Pass on a signal; a signal handler may call this during `wait`."""
        ...


@dataclass
class Supervisor:
    """Makes attempts at a run until the run is over.

    start: starts all processes, and returns the attempt.
    read_step: returns the newest step of the run, or None if that is unknown.
    backoff_s: the seconds to wait after the first crash; each further crash doubles it.
    diary: a file to which each attempt appends a JSON line.
    on_end: called at the end of `run`, also after an exception. SIGNALS do not
        interrupt it.
    stop_requested: returns whether a user of any machine asked the run to stop.
    """

    start: Callable[[], Attempt]
    read_step: Callable[[], int | None]
    max_restarts: int
    backoff_s: float
    diary: Path
    on_end: Callable[[], object] = lambda: None
    stop_requested: Callable[[], bool] = lambda: False
    _wait: Wait = field(default_factory=Wait, init=False)
    _attempt: Attempt | None = field(default=None, init=False)
    _crash_steps: list[int | None] = field(default_factory=list, init=False)

    def run(self) -> int:
        """Make attempts until the run is over; return its exit code."""
        previous_handlers = {n: signal.signal(n, self._stop) for n in SIGNALS}
        try:
            while (code := self._attempt_once()) is None:
                pass
            return code
        finally:
            # The handlers are restored after `on_end`, because a second Ctrl-C must not
            # interrupt the release of machines that cost money.
            self.on_end()
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def _attempt_once(self) -> int | None:
        """Make one attempt; return the run's exit code, or None to start again."""
        if self._wait.last_signal is not None:  # the signal came during the pause
            return self._wait.exit_code
        if self.stop_requested():
            log.info("the run was asked to stop: it does not start")
            return STOPPED
        began = time.time()
        self._attempt = self.start()
        if self._wait.last_signal is not None:  # the signal came during the start
            self._attempt.stop(self._wait.last_signal)
        codes = list(self._attempt.wait())
        self._attempt = None
        verdict, code = judge(codes)
        record = {"began": began, "ended": time.time(), "codes": codes}
        final_code, pause_s = self._decide(verdict, code)
        record |= {"verdict": verdict, "over": final_code is not None}
        with self.diary.open("a") as diary:
            diary.write(json.dumps(record) + "\n")
        self._wait(pause_s)
        return final_code

    def _decide(self, verdict: Verdict, code: int) -> tuple[int | None, float]:
        """Return the run's exit code (None to start again), and the seconds to wait."""
        was_signalled = self._wait.last_signal is not None
        if was_signalled or verdict in (Verdict.done, Verdict.stop):
            return code, 0
        if verdict is Verdict.again:
            log.info("ended with %d, which is not counted: starting again", code)
            return None, _OWNED_PAUSE_S if code == OWNED else _PAUSE_S
        self._crash_steps.append(self.read_step())
        steps = self._crash_steps[-SAME_STEP:]
        if len(steps) == SAME_STEP and steps[0] is not None and len({*steps}) == 1:
            log.error("crashed %d times at step %d: giving up", SAME_STEP, steps[0])
            return CRASHES_AGAIN, 0
        crashes = len(self._crash_steps)
        pause_s = pause_after_crash(code, crashes, self.max_restarts, self.backoff_s)
        return (code, 0) if pause_s is None else (None, pause_s)

    def _stop(self, number: int, frame: object) -> None:
        self._wait.record(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        log.info("%s: the run is asked to save and stop", signal.Signals(number).name)
        if self._attempt is not None and self._wait.last_signal is not None:
            self._attempt.stop(self._wait.last_signal)


def run_step(job: Job) -> int | None:
    """Return the run's newest step, or None if its status cannot be read."""
    status = run_module("train.status", job.status_arguments, capture_output=True)
    return json.loads(status.stdout)["step"] if status.returncode == 0 else None


def describe_attempts(diary: Path) -> list[str]:
    """Return one line for each attempt in the diary."""
    attempts = diary.read_text().splitlines() if diary.exists() else []
    lines = []
    for number, attempt in enumerate(map(json.loads, attempts), start=1):
        codes = ", ".join("lost" if c is None else str(c) for c in attempt["codes"])
        took_s = attempt["ended"] - attempt["began"]
        follow_up = "the last" if attempt["over"] else "again"
        line = f"attempt {number}   {took_s:.0f} s, exit codes {codes}: {follow_up}"
        lines.append(line)
    return lines
