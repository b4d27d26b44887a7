"""One start of a run on other machines, watched from here by asking them now and then.

Training there has a session of its own (`remote/run_script.py`), so that neither a
broken connection nor the end of this process harms it; whoever watches next takes it
up.
"""

import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from launch.policy import AGAIN, NEVER_AGAIN, OTHERS_S
from launch.remote.run_script import State
from train.errors import FINISHED, PREEMPTED, STOPPED

log = logging.getLogger(__name__)

LOST_S = 600.0  # without an answer: its host is lost
SILENT_S = 120.0  # the same, once others have ended
_LINES = 200  # of those that crashed


class Wait:
    """Pauses that end when a signal has come; what came is kept."""

    def __init__(self) -> None:
        """Begin without a signal."""
        self.asked: int | None = None
        self.count = 0

    def ask(self, number: int) -> None:
        """Take a signal; may be called from a handler, and so takes no lock."""
        self.asked = number
        self.count += 1

    def __call__(self, seconds: float, known: int = 0) -> bool:
        """Wait; True if a signal came, now or before.

        Args:
            seconds: at most.
            known: so many signals end no pause any more.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and self.count <= known:
            time.sleep(min(left, 0.1))
        return self.asked is not None


class Hosts(Protocol):
    """The machines of a run."""

    @property
    def processes(self) -> int:
        """How many there are in all."""
        ...

    def begin(self, wait: Wait, take_up: bool) -> bool:
        """Start all processes; False if a signal came before.

        Args:
            wait: pauses.
            take_up: rather watch those that run already, if there are any.
        """
        ...

    def ask(self, verb: str, *words: str | int) -> Mapping[str, State]:
        """Run a verb of run.sh on all; return the states of those who answer."""
        ...

    def said(self, without: int) -> bytes:
        """Return what process 0 has said, without its first bytes; may be nothing."""
        ...

    def tail(self, code: int) -> str:
        """Return the last lines of those that ended with a code."""
        ...

    def gone(self) -> bool:
        """Return whether the machines are known to be no more."""
        ...


class RemoteAttempt:
    """One start of all processes (the supervisor's `Attempt`)."""

    def __init__(
        self,
        hosts: Hosts,
        file: Path,
        poll_s: float,
        take_up: bool = False,
        begun: bool = False,
        show: bool = True,
    ):
        """Begin nothing yet: `wait` does.

        Args:
            hosts: the machines.
            file: gets what process 0 says.
            poll_s: between questions.
            take_up: watch what runs already, if anything does.
            begun: start nothing in any case.
            show: what process 0 says, on stderr.
        """
        self._hosts, self._file, self._poll_s = hosts, file, poll_s
        self._take_up, self._begun, self._show = take_up, begun, show
        self._wait, self._read = Wait(), 0
        self._codes: dict[str, int | None] = {}
        self._heard: dict[str, float] = {}

    def stop(self, number: int) -> None:
        """Pass a signal on, as soon as the machines answer."""
        self._wait.ask(number)

    def wait(self) -> Sequence[int | None]:
        """Start all, and wait for their ends."""
        if not (self._begun or self._hosts.begin(self._wait, self._take_up)):
            over = STOPPED if self._wait.asked == signal.SIGINT else PREEMPTED
            return [over] * self._hosts.processes
        began = self._since = time.monotonic()
        told, tried = 0, 0
        while True:
            if (tried := self._wait.count) > told and self._signal():
                told = tried
            states = self._hosts.ask("poll")
            self._take(states)
            self._pass_on()
            if self._all_ended(began):
                break
            if len(states) < self._hosts.processes and self._hosts.gone():
                log.warning("the machines are gone")
                break
            self._end_the_rest()
            self._wait(self._poll_s, known=tried)
        self._say_crash()
        missing = self._hosts.processes - len(self._codes)
        return [*self._codes.values(), *([None] * missing)]

    def _signal(self) -> bool:
        """Signal all; one that gets it is enough, as they agree on the step."""
        number = self._wait.asked or signal.SIGTERM
        name = signal.Signals(number).name.removeprefix("SIG")
        if any(s.word == "told" for s in self._hosts.ask("signal", name).values()):
            log.info("the run is told; it saves and stops")
            return True
        log.warning("nobody could be told to stop yet")
        return False

    def _end_the_rest(self) -> None:
        """Kill those that go on for long after others have ended."""
        if not self._codes:
            self._since = time.monotonic()
        elif time.monotonic() > self._since + OTHERS_S:
            log.warning("some do not end: killed")
            self._hosts.ask("signal", "KILL")
            self._since = time.monotonic()

    def _take(self, states: Mapping[str, State]) -> None:
        now = time.monotonic()
        for name, state in states.items():
            self._heard[name] = now
            if state.word in ("ended", "lost"):
                self._codes[name] = state.code
            else:
                self._codes.pop(name, None)

    def _all_ended(self, began: float) -> bool:
        """Return whether all have ended, or have not been heard of for long."""
        late = time.monotonic() - (SILENT_S if self._codes else LOST_S)
        silent = [n for n, at in self._heard.items() if at < late]
        for name in silent:
            if name not in self._codes:
                log.warning("%s does not answer: lost", name)
                self._codes[name] = None
        never = 0 if began > late else self._hosts.processes - len(self._heard)
        return len(self._codes) + never >= self._hosts.processes

    def _pass_on(self) -> None:
        """Keep what process 0 has said since, and show it."""
        said = self._hosts.said(self._read)
        self._read += len(said)
        with self._file.open("ab") as file:
            file.write(said)
        if self._show and said:
            sys.stderr.buffer.write(said)
            sys.stderr.flush()

    def _say_crash(self) -> None:
        """Log the last lines of those that crashed: only process 0 is shown."""
        known = (FINISHED, *AGAIN, *NEVER_AGAIN)
        crashes = {c for c in self._codes.values() if c is not None} - {*known}
        for code in sorted(crashes):
            lines = self._hosts.tail(code).splitlines()[:_LINES]
            log.error("ended with %d:\n%s", code, "\n".join(lines))
