"""Machines that ssh reaches: files there, commands there.

Files travel over the connections' standard input, so that what they hold is on no
command line. An ssh that ends with 255 says nothing of the process there.
"""

import logging
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from data.storage import is_remote
from launch.config import SshCluster
from launch.job import port_of
from launch.remote.hosts import KEEP_ALIVE, Hosts, files_of
from launch.remote.run_script import read_states, remote_folder, run_words
from launch.submissions import RECORD, Submission
from launch.subprocesses import ASK_S, LONGEST_S, run_captured
from train.errors import WRONG_CONFIG, Exit

log = logging.getLogger(__name__)

# Never a question on a terminal; a host that is off is known to be so soon.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", *KEEP_ALIVE)
_HOPELESS = ("Permission denied", "Could not resolve", "Host key verification failed")
_AT_ONCE = 32
Answers = dict[str, tuple[int, bytes, str]]  # host -> exit code, output, errors


def ssh_command(cluster: SshCluster, host: str, line: str) -> list[str]:
    """Return the command that runs a line of shell on a host."""
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return ["ssh", *options, *cluster.options, "--", host, line]


def put_line(name: str, file: str) -> str:
    """Return the line of shell that puts what it reads into a file, whole or not."""
    path = f"{remote_folder(name)}/{file}"
    # The file is moved, not copied, so that a shell that reads the old run.sh keeps it.
    write = f"umask 077 && mkdir -p {remote_folder(name)} && cat >{path}.new"
    return f"{write} && mv -f {path}.new {path}"


def start_line(name: str, cluster: SshCluster, number: int) -> str:
    """Return the line of shell that starts the processes of a host, by its number."""
    count = cluster.processes_per_node
    address = cluster.address or cluster.hosts[0].rpartition("@")[2]
    port, world_size = cluster.port or port_of(name), count * len(cluster.hosts)
    first = number * count
    return run_words(name, "start", [first, count, world_size, address, port])


class SshHosts(Hosts):
    """The hosts of `cluster.hosts`; they may always come back."""

    def __init__(self, submission: Submission, cluster: SshCluster):
        processes = cluster.processes_per_node * len(cluster.hosts)
        super().__init__(submission, processes, cluster.poll_s)
        self._cluster, self._reached = cluster, False

    def _start(self) -> bool:
        if not (self._put() and self._shared()):
            return False
        answers = self._on_all(lambda n: start_line(self._name, self._cluster, n))
        return len(read_states(_together(answers))) == self.processes

    def _put(self) -> bool:
        """Copy what is needed to all hosts; return whether that succeeded.

        Raises:
            Exit: ssh will not come through, whatever one waits for.
        """
        for file in files_of(self._cluster):
            content = (self._submission.folder / file).read_bytes()
            answers = self._on_all(lambda _, f=file: put_line(self._name, f), content)
            failed = {host: err for host, (code, _, err) in answers.items() if code}
            for host, err in failed.items():
                if not self._reached and any(words in err for words in _HOPELESS):
                    raise Exit(WRONG_CONFIG, f"{host}: {err.strip()}")
                log.warning("%s: %s", host, err.strip())
            if failed:
                return False
        self._reached = True
        return True

    def _shared(self) -> bool:
        """Return whether all hosts see the run's folder; False: some do not answer.

        Raises:
            Exit: a host has no such folder: its processes would be a run of their own.
        """
        if is_remote(self._submission.run_dir):
            return True
        record = shlex.quote(str(self._submission.folder / RECORD))
        line = f"test -e {record} && echo yes || echo no"
        answers = self._on_all(lambda _: line, timeout_s=ASK_S)
        for host, (_, out, _) in answers.items():
            if out.strip() == b"no":
                message = f"{host} does not see {self._submission.run_dir}: "
                message += "cluster=ssh wants a folder that all hosts share"
                raise Exit(WRONG_CONFIG, message)
        return all(out.strip() == b"yes" for _, out, _ in answers.values())

    def _run(self, verb: str, *words: str | int) -> str:
        count = self._cluster.processes_per_node

        def line(number: int) -> str:
            return run_words(self._name, verb, [number * count, count, *words])

        return _together(self._on_all(line, timeout_s=ASK_S))

    def _run_on_first(self, line: str) -> bytes:
        host = self._cluster.hosts[0]
        return run_captured(ssh_command(self._cluster, host, line), ASK_S)[1]

    def _on_all(
        self,
        line: Callable[[int], str],
        stdin: bytes = b"",
        timeout_s: float = LONGEST_S,
    ) -> Answers:
        """Run a line of shell, by the host's number, on many hosts at once."""
        hosts = self._cluster.hosts

        def run(number: int) -> tuple[int, bytes, str]:
            command = ssh_command(self._cluster, hosts[number], line(number))
            return run_captured(command, timeout_s, stdin=stdin)

        with ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as pool:
            return dict(zip(hosts, pool.map(run, range(len(hosts))), strict=True))


def _together(answers: Answers) -> str:
    return b"".join(out for _, out, _ in answers.values()).decode(errors="replace")
