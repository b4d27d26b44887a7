"""The base class for the machines of a run that are reached over ssh.

Each machine has a `run.sh` (remote/run_script.py) in a local folder.
"""

import logging
import signal
from abc import ABC, abstractmethod

from launch.config import SshCluster, TpuVmCluster
from launch.config.clusters import Code
from launch.job import ARCHIVE, UNPACK
from launch.node import asked_to_stop
from launch.remote.run_script import RUN, State, read_states, verb_line
from launch.submissions import Submission
from launch.supervisor import Wait

log = logging.getLogger(__name__)

# These options of ssh close a connection after a minute without an answer.
KEEP_ALIVE = ("ServerAliveInterval=15", "ServerAliveCountMax=4")
_RETRY_S = 15.0  # the pause before another try if some hosts could not be reached


def files_of(cluster: SshCluster | TpuVmCluster) -> list[str]:
    """List the names of the files to copy to each machine."""
    return [RUN, UNPACK, ARCHIVE] if cluster.code is Code.archive else [RUN]


class Hosts(ABC):
    """The machines and processes of a submission, polled every `poll_s` seconds."""

    def __init__(self, submission: Submission, processes: int, poll_s: float):
        self._submission = submission
        self._name = submission.name
        self.processes = processes
        self.poll_s = poll_s

    def begin(self, wait: Wait, watch_running: bool) -> bool:
        """Start all processes. With `watch_running`, start none if some already run.

        Returns False if a signal came first.
        """
        while not self._stop_requested(wait) and self._await_machines(wait):
            if watch_running and (count := self._count_running()):
                log.info("%d processes already run there: watching them", count)
                return True
            if self._start():
                self._stop_requested(wait)  # records a stop, which attempts pass on
                return True
            wait(_RETRY_S)
        return False

    def _stop_requested(self, wait: Wait) -> bool:
        """Return whether a signal came, or `action=stop` was typed on any machine."""
        if asked_to_stop(self._submission.folder):
            wait.record(signal.SIGINT)
        return wait(0)

    def ask(self, verb: str, *words: str | int) -> dict[str, State]:
        """Run a verb of run.sh for all processes; return the states that it reports."""
        return read_states(self._run(verb, *words))

    def output(self, skip: int) -> bytes:
        """Return the output of process 0 after `skip` bytes; b"" if unreachable."""
        return self._run_on_first(verb_line(self._name, "said", [0, skip]))

    def tail(self, code: int) -> str:
        """Return the last output lines of the processes that ended with `code`."""
        return self._run("tail", code)

    def gone(self) -> bool:
        """Return whether the machines certainly no longer exist."""
        return False

    def may_be_running(self) -> bool:
        """Return whether processes may be running on the machines."""
        return self._count_running() > 0

    def release(self) -> None:  # noqa: B027
        """Release the machines that were requested for the run, after its end."""

    def _count_running(self) -> int:
        return [state.word for state in self.ask("poll").values()].count("running")

    def _await_machines(self, wait: Wait) -> bool:
        """Wait until the machines exist; return False if a signal came first."""
        return not wait(0)

    @abstractmethod
    def _start(self) -> bool:
        """Copy the files and start all processes; return whether all were started."""

    @abstractmethod
    def _run(self, verb: str, *words: str | int) -> str:
        """Run a verb of run.sh for all processes; return their combined output."""

    @abstractmethod
    def _run_on_first(self, line: str) -> bytes:
        """Run a line of shell on the machine of process 0; return its output."""
