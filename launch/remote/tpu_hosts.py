"""Copy files to the VMs of a queued resource, and run commands there.

Source of the flags: the reference of gcloud compute tpus queued-resources ssh and scp
(SDK 528). Both commands exit with the code of an arbitrary worker, so run.sh prints the
states of all processes.
"""

import logging
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from launch.config import TpuVmCluster
from launch.job_secret import SECRET_FILE, new_secret
from launch.remote.attempt import LOST_S
from launch.remote.gcloud import GcloudError, gcloud_command
from launch.remote.hosts import KEEP_ALIVE, Hosts, files_of
from launch.remote.queued_resource import ACTIVE, QueuedResource
from launch.remote.run_script import read_states, remote_folder, verb_line
from launch.submissions import Submission
from launch.subprocesses import COMMAND_TIMEOUT_S, QUERY_TIMEOUT_S, run_captured
from launch.supervisor import Wait
from train.hardware.targets import parse_target

log = logging.getLogger(__name__)

STATES = "states.jsonl"  # records the states of the resource
_ALL = ("--node=all", "--worker=all")
_FIRST = ("--node=0", "--worker=0")  # the VM of process 0
FIRST_AND_COUNT = (0, 1)  # of run.sh: each VM runs one process, number 0


def ssh_to_vms(
    name: str, cluster: TpuVmCluster, line: str, vm_flags: tuple[str, ...] = _ALL
) -> list[str]:
    """Return the command that runs a line of shell on VMs."""
    flags = (*_keep_alive_flags("ssh"), *cluster.ssh_options, f"--command={line}")
    return gcloud_command("ssh", [name], cluster, *vm_flags, *flags)


def copy_to_vms(
    name: str, cluster: TpuVmCluster, further_files: Sequence[str] = ()
) -> list[str]:
    """Return the command that copies files of the working directory to all VMs."""
    paths = [
        *files_of(cluster),
        *further_files,
        f"{name}:{remote_folder(name)}/incoming/",
    ]
    flags = (*_keep_alive_flags("scp"), *cluster.ssh_options)
    return gcloud_command("scp", paths, cluster, *_ALL, *flags)


def mkdir_line(name: str) -> str:
    """Return the line of shell that makes the folder for copied files."""
    return f"mkdir -p {remote_folder(name)}/incoming"


def start_training_line(name: str) -> str:
    """Return the line of shell that starts training from the copied files."""
    # Files are replaced, which does not disturb a shell that runs the old run.sh.
    folder = remote_folder(name)
    start = verb_line(name, "start", FIRST_AND_COUNT)
    return f"mv -f {folder}/incoming/* {folder}/ && {start}"


def _keep_alive_flags(verb: str) -> list[str]:
    # Each flag is one word, because gcloud splits flags at spaces.
    return [f"--{verb}-flag=-o{option}" for option in KEEP_ALIVE]


class TpuHosts(Hosts):
    """The VMs of `cluster.target`, one process each."""

    def __init__(self, submission: Submission, cluster: TpuVmCluster):
        processes = parse_target(cluster.target or "").num_hosts
        super().__init__(submission, processes, cluster.poll_s)
        self._cluster = cluster
        self._unreached_since = None
        diary = submission.local_folder() / STATES
        self.resource = QueuedResource(submission.name, cluster, diary)

    def _await_machines(self, wait: Wait) -> bool:
        is_stopped = partial(self._stop_requested, wait)
        return self.resource.ensure(wait, self.poll_s, is_stopped)

    def _start(self) -> bool:
        num_started = self._copy_and_start()
        if num_started >= self.processes:
            self._unreached_since = None
            return True
        now = time.monotonic()
        self._unreached_since = self._unreached_since or now
        log.warning("%d of %d VMs were reached", num_started, self.processes)
        if now > self._unreached_since + LOST_S:
            log.warning("that has lasted too long: requesting other machines")
            self.resource.delete()
            self._unreached_since = None
        return False

    def _copy_and_start(self) -> int:
        """Copy the files and start training; return the number of VMs that started."""
        # The secret lies outside the folder of the submission, which is kept.
        with tempfile.TemporaryDirectory() as folder:
            secret = Path(folder) / SECRET_FILE
            secret.write_text(new_secret())
            for command in (
                ssh_to_vms(self._name, self._cluster, mkdir_line(self._name)),
                copy_to_vms(self._name, self._cluster, [str(secret)]),
            ):
                code, _, err = run_captured(command, cwd=self._copy_to_local_folder())
                if code:
                    log.warning("%s", GcloudError(err, code))
                    return 0
        output = self._run_line(
            start_training_line(self._name), timeout_s=COMMAND_TIMEOUT_S
        )
        return len(read_states(output.decode(errors="replace")))

    def _copy_to_local_folder(self) -> Path:
        """Write the files that the VMs need to a local folder; return the folder."""
        folder = self._submission.local_folder()
        for file in files_of(self._cluster):
            if not (folder / file).exists():
                content = (self._submission.folder / file).read_bytes()
                (folder / file).write_bytes(content)
        return folder

    def _run(self, verb: str, *words: str | int) -> str:
        line = verb_line(self._name, verb, [*FIRST_AND_COUNT, *words])
        return self._run_line(line).decode(errors="replace")

    def _run_on_first(self, line: str) -> bytes:
        return self._run_line(line, _FIRST)

    def _run_line(
        self,
        line: str,
        vm_flags: tuple[str, ...] = _ALL,
        timeout_s: float = QUERY_TIMEOUT_S,
    ) -> bytes:
        command = ssh_to_vms(self._name, self._cluster, line, vm_flags)
        return run_captured(command, timeout_s)[1]

    def gone(self) -> bool:
        """Return whether the queued resource is no longer active."""
        try:
            return self.resource.query().state != ACTIVE
        except GcloudError as error:
            log.warning("%s", error)
            return False

    def may_be_running(self) -> bool:
        """Return whether the VMs exist: even unreachable VMs may run processes."""
        return not self.gone()

    def release(self) -> None:
        """Delete the VMs, unless `cluster.keep`."""
        if not self._cluster.keep:
            self.resource.delete()
