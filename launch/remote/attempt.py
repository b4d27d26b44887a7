"""One start of a run on other machines, which this process polls."""

import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch.policy import AGAIN, NEVER_AGAIN, OTHERS_S
from launch.remote.hosts import Hosts
from launch.remote.run_script import State
from launch.supervisor import Wait
from train.errors import FINISHED

log = logging.getLogger(__name__)

LOST_S = 600.0  # a host that does not answer for this time is lost
SILENT_S = 120.0  # the same, after other processes have ended
_LINES = 200  # the number of lines shown of a crashed process


class RemoteAttempt:
    """One start of all processes (the supervisor's `Attempt`).

    file: the local file for the output of process 0.
    begin: starts the processes, or finds them running. It returns False if a signal
        came first.
    show: whether the output of process 0 is also printed on stderr.
    """

    def __init__(
        self, hosts: Hosts, file: Path, begin: Callable[[Wait], bool], show: bool = True
    ):
        self._hosts, self._file, self._begin, self._show = hosts, file, begin, show
        self._wait, self._read = Wait(), 0
        self._codes: dict[str, int | None] = {}
        self._heard_at: dict[str, float] = {}

    def stop(self, number: int) -> None:
        """Pass a signal on when the machines answer."""
        self._wait.ask(number)

    def wait(self) -> Sequence[int | None]:
        """Start all processes, wait for them, and return their exit codes."""
        if not self._begin(self._wait):
            return [self._wait.exit_code] * self._hosts.processes
        began = self._since = time.monotonic()
        reported, tried = 0, 0
        while True:
            if (tried := self._wait.count) > reported and self._signal():
                reported = tried
            states = self._hosts.ask("poll")
            self._note(states)
            self._copy_output()
            if self._all_ended(began):
                break
            if len(states) < self._hosts.processes and self._hosts.gone():
                log.warning("the machines are gone")
                break
            self._end_the_rest()
            self._wait(self._hosts.poll_s, handled=tried)
        self._log_crashes()
        missing = self._hosts.processes - len(self._codes)
        return [*self._codes.values(), *([None] * missing)]

    def _signal(self) -> bool:
        """Return whether one received the signal: enough, as they agree on the step."""
        number = self._wait.asked or signal.SIGTERM
        name = signal.Signals(number).name.removeprefix("SIG")
        if any(s.word == "told" for s in self._hosts.ask("signal", name).values()):
            log.info("the run has the signal; it saves and stops")
            return True
        log.warning("no process has received the signal to stop yet")
        return False

    def _end_the_rest(self) -> None:
        """Kill processes that continue for long after others have ended."""
        if not self._codes:
            self._since = time.monotonic()
        elif time.monotonic() > self._since + OTHERS_S:
            log.warning("some processes do not end, so they are killed")
            self._hosts.ask("signal", "KILL")
            self._since = time.monotonic()

    def _note(self, states: Mapping[str, State]) -> None:
        for name, state in states.items():
            self._heard_at[name] = time.monotonic()
            if state.word in ("ended", "lost"):
                self._codes[name] = state.code
            else:
                self._codes.pop(name, None)

    def _all_ended(self, began: float) -> bool:
        """Return whether all processes have ended, or are lost."""
        late = time.monotonic() - (SILENT_S if self._codes else LOST_S)
        for name, heard_at in self._heard_at.items():
            if heard_at < late and name not in self._codes:
                log.warning("%s does not answer: lost", name)
                self._codes[name] = None
        num_silent = 0 if began > late else self._hosts.processes - len(self._heard_at)
        return len(self._codes) + num_silent >= self._hosts.processes

    def _copy_output(self) -> None:
        """Append new output of process 0 to the file, and show it."""
        new = self._hosts.output(self._read)
        self._read += len(new)
        with self._file.open("ab") as file:
            file.write(new)
        if self._show and new:
            sys.stderr.buffer.write(new)
            sys.stderr.flush()

    def _log_crashes(self) -> None:
        """Log the last lines of crashed processes, whose output is not shown."""
        crashes = {code for code in self._codes.values() if code is not None}
        for code in sorted(crashes - {FINISHED, *AGAIN, *NEVER_AGAIN}):
            lines = self._hosts.tail(code).splitlines()[:_LINES]
            log.error("ended with %d:\n%s", code, "\n".join(lines))
