"""The machines of a run, which are asked over ssh: what all kinds of them share.

Each has a `run.sh` (remote/run_script.py) in a folder of its own.
"""

import logging
import signal
from abc import ABC, abstractmethod

from launch.config import SshCluster, TpuVmCluster
from launch.config.clusters import Code
from launch.job import ARCHIVE, UNPACK
from launch.node import asked_to_stop
from launch.remote.run_script import RUN, State, read_states, run_words
from launch.submissions import Submission
from launch.supervisor import Wait

log = logging.getLogger(__name__)

# Options of ssh that end a connection to a host that is silent for a minute.
KEEP_ALIVE = ("ServerAliveInterval=15", "ServerAliveCountMax=4")
_AGAIN_S = 15.0  # the pause before another try if some hosts could not be reached


def files_of(cluster: SshCluster | TpuVmCluster) -> list[str]:
    """List the files that go there."""
    return [RUN, UNPACK, ARCHIVE] if cluster.code is Code.archive else [RUN]


class Hosts(ABC):
    """The machines of a submission, with all their processes, asked every `poll_s`."""

    def __init__(self, submission: Submission, processes: int, poll_s: float):
        self._submission, self._name = submission, submission.name
        self.processes, self.poll_s = processes, poll_s

    def begin(self, wait: Wait, take_up: bool) -> bool:
        """Start all processes, or with `take_up` watch those that run already.

        Return False if a signal came before.
        """
        while not self._stopped(wait) and self._await_machines(wait):
            if take_up and (count := self._running()):
                log.info("%d processes run there already: watched", count)
                return True
            if self._start():
                self._stopped(wait)  # asked meanwhile: the attempt passes it on
                return True
            wait(_AGAIN_S)
        return False

    def _stopped(self, wait: Wait) -> bool:
        """Return whether a signal came; `action=stop` anywhere is as good as one."""
        if asked_to_stop(self._submission.folder):
            wait.ask(signal.SIGINT)
        return wait(0)

    def ask(self, verb: str, *words: str | int) -> dict[str, State]:
        """Run a verb of run.sh on all; return the states of those who answer."""
        return read_states(self._run(verb, *words))

    def output(self, skip: int) -> bytes:
        """Return what process 0 has written, without its first bytes; may be none."""
        return self._run_on_first(run_words(self._name, "said", [0, skip]))

    def tail(self, code: int) -> str:
        """Return the last lines of those that ended with a code."""
        return self._run("tail", code)

    def gone(self) -> bool:
        """Return whether the machines are known to be no more."""
        return False

    def may_run(self) -> bool:
        """Return whether there may be something to stop."""
        return self._running() > 0

    def release(self) -> None:  # noqa: B027
        """Give the machines back, if they were lent: the run is over."""

    def _running(self) -> int:
        return [state.word for state in self.ask("poll").values()].count("running")

    def _await_machines(self, wait: Wait) -> bool:
        """Wait until there are machines; return False if a signal came before."""
        return not wait(0)

    @abstractmethod
    def _start(self) -> bool:
        """Copy what is needed, and start; return whether that succeeded on all."""

    @abstractmethod
    def _run(self, verb: str, *words: str | int) -> str:
        """Run a verb of run.sh for all processes; return what all have answered."""

    @abstractmethod
    def _run_on_first(self, line: str) -> bytes:
        """Run a line of shell on the machine of process 0; return its output."""
