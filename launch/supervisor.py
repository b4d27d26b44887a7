"""Keep a run going: start it again until it is finished or another start cannot help.

Preemptions and lost hosts do not count. Crashes do, with growing pauses, up to a limit,
and never three at the same step. A signal to stop is passed to the run, which saves,
and then ends the supervisor.
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

_PAUSE_S = 1.0  # after what is not counted
_OWNED_PAUSE_S = 15.0  # another process is at it: it may leave, or die
ATTEMPTS = "attempts.jsonl"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # to stop


class Wait:
    """Pauses that end when a signal has come; what came is kept."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.count = 0

    def ask(self, number: int) -> None:
        """Take a signal; may be called from a handler, and so takes no lock."""
        self.asked = number
        self.count += 1

    def __call__(self, seconds: float, handled: int = 0) -> bool:
        """Wait, and return whether a signal has arrived, now or earlier.

        The first `handled` signals end no pause any more.
        """
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0 and self.count <= handled:
            time.sleep(min(left_s, 0.1))
        return self.asked is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a run that a signal ended before it could start."""
        return STOPPED if self.asked == signal.SIGINT else PREEMPTED


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

    start: begins an attempt.
    step: returns the newest step of the run, None if it has none or cannot be asked.
    diary: a file that gets a JSON line for each attempt.
    over: called at the end, however that comes about; no signal interrupts it.
    stopped: returns whether the run was asked to stop, maybe on another machine.
    """

    start: Callable[[], Attempt]
    step: Callable[[], int | None]
    max_restarts: int
    backoff_s: float
    diary: Path
    over: Callable[[], object] = lambda: None
    stopped: Callable[[], bool] = lambda: False
    _wait: Wait = field(default_factory=Wait, init=False)
    _attempt: Attempt | None = field(default=None, init=False)
    _crashed_at: list[int | None] = field(default_factory=list, init=False)

    def run(self) -> int:
        """Go on to the end; return the exit code that says what it was."""
        previous_handlers = {n: signal.signal(n, self._stop) for n in SIGNALS}
        try:
            while (code := self._once()) is None:
                pass
            return code
        finally:
            # Who presses Ctrl-C twice would else leave machines that cost money.
            self.over()
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def _once(self) -> int | None:
        """Make one attempt; return an exit code if it was the last."""
        if self._wait.asked is not None:  # in the pause
            return self._wait.exit_code
        if self.stopped():
            log.info("asked to stop: does not start")
            return STOPPED
        began = time.time()
        self._attempt = self.start()
        if self._wait.asked is not None:  # while it started
            self._attempt.stop(self._wait.asked)
        codes = list(self._attempt.wait())
        self._attempt = None
        verdict, code = judge(codes)
        line = {"began": began, "ended": time.time(), "codes": codes}
        last, pause_s = self._next(verdict, code)
        line |= {"verdict": verdict, "over": last is not None}
        with self.diary.open("a") as diary:
            diary.write(json.dumps(line) + "\n")
        self._wait(pause_s)
        return last

    def _next(self, verdict: Verdict, code: int) -> tuple[int | None, float]:
        """Return the exit code, if this end is the last, and the seconds to wait."""
        if self._wait.asked is not None or verdict in (Verdict.done, Verdict.stop):
            return code, 0
        if verdict is Verdict.again:
            log.info("ended with %d; again, this does not count", code)
            return None, _OWNED_PAUSE_S if code == OWNED else _PAUSE_S
        self._crashed_at.append(self.step())
        last = self._crashed_at[-SAME_STEP:]
        if len(last) == SAME_STEP and last[0] is not None and len({*last}) == 1:
            log.error("crashed %d times at step %d: not again", SAME_STEP, last[0])
            return CRASHES_AGAIN, 0
        crashes = len(self._crashed_at)
        pause_s = pause_after_crash(code, crashes, self.max_restarts, self.backoff_s)
        return (code, 0) if pause_s is None else (None, pause_s)

    def _stop(self, number: int, frame: object) -> None:
        self._wait.ask(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        log.info("%s: the run is asked to save and stop", signal.Signals(number).name)
        if self._attempt is not None and self._wait.asked is not None:
            self._attempt.stop(self._wait.asked)


def run_step(job: Job) -> int | None:
    """Return the newest step of the run; None if it cannot be asked."""
    status = run_module("train.status", job.status_arguments, capture_output=True)
    return json.loads(status.stdout)["step"] if status.returncode == 0 else None


def describe_attempts(diary: Path) -> list[str]:
    """Return a line for each attempt so far: how it ended."""
    attempts = diary.read_text().splitlines() if diary.exists() else []
    lines = []
    for number, attempt in enumerate(map(json.loads, attempts), start=1):
        codes = ", ".join("lost" if c is None else str(c) for c in attempt["codes"])
        took_s = attempt["ended"] - attempt["began"]
        last = "the last" if attempt["over"] else "again"
        lines.append(f"attempt {number}   {took_s:.0f} s, exit codes {codes}: {last}")
    return lines
