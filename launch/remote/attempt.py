"""One start of a run on other machines, which this process polls."""

import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch.policy import LAST_SAVE_S, NO_RESTART_CODES, RESTART_CODES
from launch.remote.hosts import Hosts
from launch.remote.run_script import State
from launch.supervisor import Wait
from train.errors import FINISHED

log = logging.getLogger(__name__)

LOST_S = 600.0  # a process whose host is silent for this time is lost
SILENT_S = 120.0  # the same limit, once any process has ended
_MAX_LINES = 200  # the maximum number of output lines of crashed processes


class RemoteAttempt:
    """One start of all processes (implements `launch.supervisor.Attempt`).

    file: the local file for the output of process 0.
    begin: starts the processes, or finds them running. It returns False if a signal
        came first.
    show: whether the output of process 0 is also printed on stderr.
    """

    def __init__(
        self, hosts: Hosts, file: Path, begin: Callable[[Wait], bool], show: bool = True
    ):
        self._hosts = hosts
        self._file = file
        self._begin = begin
        self._show = show
        self._wait = Wait()
        self._num_bytes_read = 0
        self._codes: dict[str, int | None] = {}
        self._answered_at: dict[str, float] = {}

    def stop(self, number: int) -> None:
        """Record a signal; `wait` passes it on when the machines answer."""
        self._wait.record(number)

    def wait(self) -> Sequence[int | None]:
        """Start all processes, wait for them, and return their exit codes."""
        if not self._begin(self._wait):
            return [self._wait.exit_code] * self._hosts.processes
        began = self._grace_began = time.monotonic()
        num_delivered = 0
        num_signals = 0
        while True:
            num_signals = self._wait.count
            if num_signals > num_delivered and self._pass_on_signal():
                num_delivered = num_signals
            states = self._hosts.ask("poll")
            self._record_states(states)
            self._copy_output()
            if self._all_ended(began):
                break
            if len(states) < self._hosts.processes and self._hosts.gone():
                log.warning("the machines are gone")
                break
            self._kill_stragglers()
            self._wait(self._hosts.poll_s, handled=num_signals)
        self._log_crashes()
        missing = self._hosts.processes - len(self._codes)
        return [*self._codes.values(), *([None] * missing)]

    def _pass_on_signal(self) -> bool:
        """Signal the processes; return whether any received it. Then all will stop."""
        number = self._wait.last_signal or signal.SIGTERM
        name = signal.Signals(number).name.removeprefix("SIG")
        if any(s.word == "told" for s in self._hosts.ask("signal", name).values()):
            log.info("the run has the signal; it saves and stops")
            return True
        log.warning("no process has received the signal to stop yet")
        return False

    def _kill_stragglers(self) -> None:
        """Kill processes that still run LAST_SAVE_S seconds after another has ended."""
        if not self._codes:
            self._grace_began = time.monotonic()
        elif time.monotonic() > self._grace_began + LAST_SAVE_S:
            log.warning("some processes do not end, so they are killed")
            self._hosts.ask("signal", "KILL")
            self._grace_began = time.monotonic()

    def _record_states(self, states: Mapping[str, State]) -> None:
        for name, state in states.items():
            self._answered_at[name] = time.monotonic()
            if state.word in ("ended", "lost"):
                self._codes[name] = state.code
            else:
                self._codes.pop(name, None)

    def _all_ended(self, began: float) -> bool:
        """Mark silent processes as lost; return whether all have ended or are lost."""
        cutoff = time.monotonic() - (SILENT_S if self._codes else LOST_S)
        for name, answered_at in self._answered_at.items():
            if answered_at < cutoff and name not in self._codes:
                log.warning("%s does not answer: lost", name)
                self._codes[name] = None
        num_silent = self._hosts.processes - len(self._answered_at)
        num_lost = 0 if began > cutoff else num_silent
        return len(self._codes) + num_lost >= self._hosts.processes

    def _copy_output(self) -> None:
        """Append new output of process 0 to the file, and show it."""
        output = self._hosts.output(self._num_bytes_read)
        self._num_bytes_read += len(output)
        with self._file.open("ab") as file:
            file.write(output)
        if self._show and output:
            sys.stderr.buffer.write(output)
            sys.stderr.flush()

    def _log_crashes(self) -> None:
        """Log the last lines of crashed processes: only process 0's output is shown."""
        crashes = {code for code in self._codes.values() if code is not None}
        for code in sorted(crashes - {FINISHED, *RESTART_CODES, *NO_RESTART_CODES}):
            lines = self._hosts.tail(code).splitlines()[:_MAX_LINES]
            log.error("ended with %d:\n%s", code, "\n".join(lines))
