"""Copy files to machines that ssh reaches, and run commands there.

Files are sent over standard input, so that no command line shows their contents. If ssh
exits with 255, it is unknown whether the command ran on the host.
"""

import logging
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from data.storage import is_remote
from launch.config import SshCluster
from launch.job import port_of
from launch.job_secret import SECRET_FILE, new_secret
from launch.remote.hosts import KEEP_ALIVE, Hosts, files_of
from launch.remote.run_script import read_states, remote_folder, verb_line
from launch.submissions import RECORD, Submission
from launch.subprocesses import COMMAND_TIMEOUT_S, QUERY_TIMEOUT_S, run_captured
from train.errors import WRONG_CONFIG, Exit

log = logging.getLogger(__name__)

# ssh must not ask questions on a terminal, or wait long for a host that is off.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", *KEEP_ALIVE)
_FATAL = ("Permission denied", "Could not resolve", "Host key verification failed")
_MAX_CONNECTIONS = 32
Answers = dict[str, tuple[int, bytes, str]]  # host -> exit code, output, errors


def ssh_command(cluster: SshCluster, host: str, line: str) -> list[str]:
    """Return the command that runs a line of shell on a host."""
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return ["ssh", *options, *cluster.options, "--", host, line]


def write_line(name: str, file: str) -> str:
    """Return the line of shell that atomically writes standard input to a file."""
    path = f"{remote_folder(name)}/{file}"
    # The file is replaced, so a shell that is running the old run.sh is not disturbed.
    write = f"umask 077 && mkdir -p {remote_folder(name)} && cat >{path}.new"
    return f"{write} && mv -f {path}.new {path}"


def start_line(name: str, cluster: SshCluster, number: int) -> str:
    """Return the line of shell that starts the processes of host `number`."""
    count = cluster.processes_per_node
    address = cluster.address or cluster.hosts[0].rpartition("@")[2]
    port = cluster.port or port_of(name)
    world_size = count * len(cluster.hosts)
    first_process = number * count
    return verb_line(name, "start", [first_process, count, world_size, address, port])


class SshHosts(Hosts):
    """The hosts of `cluster.hosts`, which are never considered gone."""

    def __init__(self, submission: Submission, cluster: SshCluster):
        processes = cluster.processes_per_node * len(cluster.hosts)
        super().__init__(submission, processes, cluster.poll_s)
        self._cluster = cluster
        self._reached_once = False

    def _start(self) -> bool:
        if not (self._copy_files() and self._all_see_run_dir()):
            return False
        answers = self._run_on_all(lambda n: start_line(self._name, self._cluster, n))
        return len(read_states(_joined_output(answers))) == self.processes

    def _copy_files(self) -> bool:
        """Copy the files to all hosts; return whether that succeeded.

        Raises:
            Exit: ssh failed with a permanent error.
        """
        folder = self._submission.folder
        secret = new_secret().encode()
        files = {file: (folder / file).read_bytes() for file in files_of(self._cluster)}
        for file, content in {**files, SECRET_FILE: secret}.items():
            line = write_line(self._name, file)
            answers = self._run_on_all(lambda _, line=line: line, content)
            failed = {host: err for host, (code, _, err) in answers.items() if code}
            for host, err in failed.items():
                if not self._reached_once and any(words in err for words in _FATAL):
                    raise Exit(WRONG_CONFIG, f"{host}: {err.strip()}")
                log.warning("%s: %s", host, err.strip())
            if failed:
                return False
        self._reached_once = True
        return True

    def _all_see_run_dir(self) -> bool:
        """Return True if all hosts see the run's folder, False if one does not answer.

        Raises:
            Exit: a host does not see the folder, so it would start another run.
        """
        if is_remote(self._submission.run_dir):
            return True
        record = shlex.quote(str(self._submission.folder / RECORD))
        line = f"test -e {record} && echo yes || echo no"
        answers = self._run_on_all(lambda _: line, timeout_s=QUERY_TIMEOUT_S)
        for host, (_, out, _) in answers.items():
            if out.strip() == b"no":
                message = f"{host} does not see {self._submission.run_dir}: "
                message += "cluster=ssh wants a folder that all hosts share"
                raise Exit(WRONG_CONFIG, message)
        return all(out.strip() == b"yes" for _, out, _ in answers.values())

    def _run(self, verb: str, *words: str | int) -> str:
        count = self._cluster.processes_per_node

        def line_of_host(number: int) -> str:
            return verb_line(self._name, verb, [number * count, count, *words])

        return _joined_output(self._run_on_all(line_of_host, timeout_s=QUERY_TIMEOUT_S))

    def _run_on_first(self, line: str) -> bytes:
        host = self._cluster.hosts[0]
        return run_captured(ssh_command(self._cluster, host, line), QUERY_TIMEOUT_S)[1]

    def _run_on_all(
        self,
        line_of_host: Callable[[int], str],
        stdin: bytes = b"",
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> Answers:
        """Run a line of shell on each host, in parallel; return the answers by host."""
        hosts = self._cluster.hosts

        def run(number: int) -> tuple[int, bytes, str]:
            command = ssh_command(self._cluster, hosts[number], line_of_host(number))
            return run_captured(command, timeout_s, stdin=stdin)

        with ThreadPoolExecutor(min(len(hosts), _MAX_CONNECTIONS)) as pool:
            return dict(zip(hosts, pool.map(run, range(len(hosts))), strict=True))


def _joined_output(answers: Answers) -> str:
    return b"".join(out for _, out, _ in answers.values()).decode(errors="replace")
