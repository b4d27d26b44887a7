"""The VMs of a queued resource, all slices together: files there, commands there.

Commands and flags: the reference of gcloud compute tpus queued-resources ssh and scp
(SDK 528), as docs.cloud.google.com/tpu/docs/multislice-introduction uses them. Their
exit code is that of some worker, or of gcloud: what run.sh prints is what counts.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from launch.config import Code, TpuVmCluster
from launch.job import ARCHIVE, UNPACK
from launch.remote.attempt import LOST_S, Wait
from launch.remote.gcloud import GcloudError, words
from launch.remote.queued_resource import ACTIVE, QueuedResource
from launch.remote.run_script import RUN, State, folder_of, read_states, run_words
from launch.submissions import Submission
from launch.subprocesses import run_captured
from train.hardware.targets import parse_target

log = logging.getLogger(__name__)

_AGAIN_S = 15.0  # where not all could be reached
_ALL = ("--node=all", "--worker=all")
_FIRST = ("--node=0", "--worker=0")  # of which JAX makes process 0
_PROCESS = (0, 1)  # on each: number 0, and one of them


def ssh_command(
    name: str, cluster: TpuVmCluster, line: str, where: tuple[str, ...] = _ALL
) -> list[str]:
    """Return the command that runs a line of shell on VMs."""
    more = (*where, *cluster.ssh_options, f"--command={line}")
    return words("ssh", name, cluster, *more)


def copy_command(name: str, cluster: TpuVmCluster) -> list[str]:
    """Return the command that copies files of the working directory to all VMs."""
    command = words("scp", name, cluster, *_ALL, *cluster.ssh_options)
    at = command.index(name)
    files = files_of(cluster)
    return [*command[:at], *files, f"{name}:{_incoming(name)}/", *command[at + 1 :]]


def make_line(name: str) -> str:
    """Return the line of shell that makes room for the files."""
    return f"mkdir -p {_incoming(name)}"


def start_line(name: str) -> str:
    """Return the line of shell that puts files in their places, and starts training."""
    # Moved, not copied: a shell that reads the old run.sh goes on to read the old one.
    move = f"mv -f {_incoming(name)}/* {folder_of(name)}/"
    return f"{move} && {run_words(name, 'start', *_PROCESS)}"


def files_of(cluster: TpuVmCluster) -> list[str]:
    """List the files that go there."""
    return [RUN, UNPACK, ARCHIVE] if cluster.code is Code.archive else [RUN]


def _incoming(name: str) -> str:
    return f"{folder_of(name)}/incoming"


class TpuHosts:
    """The `Hosts` of a submission (launch/remote/attempt.py)."""

    def __init__(self, submission: Submission, cluster: TpuVmCluster, diary: Path):
        self._submission, self._cluster, self._name = (
            submission,
            cluster,
            submission.name,
        )
        self.resource = QueuedResource(submission.name, cluster, diary)

    @property
    def processes(self) -> int:
        """One a VM."""
        return parse_target(self._cluster.target or "").num_hosts

    def begin(self, wait: Wait, take_up: bool) -> bool:
        """Get the machines, and start all, or find them running."""
        unreached: float | None = None
        while self.resource.ensure(wait, self._cluster.poll_s):
            if take_up and self._taken_up():
                return True
            started = self._start()
            if started >= self.processes:
                return True
            unreached = unreached or time.monotonic()
            log.warning("%d of %d VMs were reached", started, self.processes)
            if time.monotonic() > unreached + LOST_S:
                log.warning("that is for too long: other machines are asked for")
                self.resource.delete()
                unreached = None
            wait(_AGAIN_S)
        return False

    def _taken_up(self) -> bool:
        states = self.ask("poll")
        running = [name for name, s in states.items() if s.word == "running"]
        if running:
            log.info("training runs there already, on %d VMs: watched", len(running))
        return bool(running)

    def _start(self) -> int:
        """Copy what is needed, and start; return on how many VMs it started."""
        for command in (
            ssh_command(self._name, self._cluster, make_line(self._name)),
            copy_command(self._name, self._cluster),
        ):
            code, _, err = run_captured(command, cwd=self._files())
            if code:
                log.warning("%s", GcloudError(err, code))
                return 0
        line = start_line(self._name)
        said = self._there(line)
        return len(read_states(said.decode(errors="replace")))

    def _files(self) -> Path:
        """Return a folder of this machine with the files that go there."""
        folder = self._submission.local_folder()
        for file in files_of(self._cluster):
            if not (folder / file).exists():
                (folder / file).write_bytes(
                    (self._submission.folder / file).read_bytes()
                )
        return folder

    def ask(self, verb: str, *more: str | int) -> Mapping[str, State]:
        """Run a verb of run.sh on all VMs."""
        said = self._there(run_words(self._name, verb, *_PROCESS, *more))
        return read_states(said.decode(errors="replace"))

    def said(self, without: int) -> bytes:
        """Return what the first worker of the first slice has said."""
        line = run_words(self._name, "said", _PROCESS[0], without)
        return self._there(line, _FIRST)

    def tail(self, code: int) -> str:
        """Return the last lines of those that ended so."""
        said = self._there(run_words(self._name, "tail", *_PROCESS, code))
        return said.decode(errors="replace")

    def _there(self, line: str, where: tuple[str, ...] = _ALL) -> bytes:
        code, out, err = run_captured(
            ssh_command(self._name, self._cluster, line, where)
        )
        if code:
            log.debug("%s", err)
        return out

    def gone(self) -> bool:
        """Return whether the queue has taken them back."""
        try:
            return self.resource.look().state != ACTIVE
        except GcloudError as error:
            log.warning("%s", error)
            return False
