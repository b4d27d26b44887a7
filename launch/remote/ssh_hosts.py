"""Machines that ssh reaches: files there, commands there.

Files travel over the connections' standard input, so that what they hold is on no
command line. An ssh that ends with 255 says nothing of the process there.
"""

import logging
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from launch.config import Code, SshCluster
from launch.job import ARCHIVE, UNPACK, port_of
from launch.remote.attempt import Wait
from launch.remote.run_script import RUN, State, folder_of, read_states, run_words
from launch.submissions import RECORD, Submission
from launch.subprocesses import run_captured
from train.errors import WRONG_CONFIG, Exit

log = logging.getLogger(__name__)

# Never a question on a terminal; a host that is off is known to be so soon.
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
_HOPELESS = ("Permission denied", "Could not resolve", "Host key verification failed")
_AGAIN_S = 15.0
_AT_ONCE = 32


def ssh_command(cluster: SshCluster, host: str, line: str) -> list[str]:
    """Return the command that runs a line of shell on a host."""
    return ["ssh", *_OPTIONS, *cluster.options, "--", host, line]


def put_line(name: str, file: str) -> str:
    """Return the line of shell that puts what it reads into a file, whole or not."""
    path = f"{folder_of(name)}/{file}"
    # Moved, not copied: a shell that reads the old run.sh goes on to read the old one.
    write = f"umask 077 && mkdir -p {folder_of(name)} && cat >{path}.new"
    return f"{write} && mv -f {path}.new {path}"


def start_line(name: str, cluster: SshCluster, number: int) -> str:
    """Return the line of shell that starts the processes of a host, by its number."""
    each = cluster.processes_per_node
    address = cluster.address or cluster.hosts[0].rpartition("@")[2]
    port = cluster.port or port_of(name)
    all_ = each * len(cluster.hosts)
    return run_words(name, "start", number * each, each, all_, address, port)


class SshHosts:
    """The `Hosts` of a submission (launch/remote/attempt.py)."""

    def __init__(self, submission: Submission, cluster: SshCluster):
        self._submission, self._cluster, self._name = (
            submission,
            cluster,
            submission.name,
        )
        self._reached = False

    @property
    def processes(self) -> int:
        """On all hosts."""
        return self._cluster.processes_per_node * len(self._cluster.hosts)

    def begin(self, wait: Wait, take_up: bool) -> bool:
        """Start all, once all hosts answer, or find them at it."""
        while not wait(0):
            if take_up and self._taken_up():
                return True
            if self._put() and self._shared() and len(self._start()) == self.processes:
                return True
            wait(_AGAIN_S)
        return False

    def _taken_up(self) -> bool:
        running = [s for s in self.ask("poll").values() if s.word == "running"]
        if running:
            log.info("%d processes run there already: watched", len(running))
        return bool(running)

    def _put(self) -> bool:
        """Copy what is needed to all hosts; False if that did not succeed.

        Raises:
            Exit: ssh will not come through, whatever one waits for.
        """
        files = [RUN, UNPACK, ARCHIVE]
        for file in files if self._cluster.code is Code.archive else files[:1]:
            content = (self._submission.folder / file).read_bytes()
            done = self._on_all(lambda _, f=file: put_line(self._name, f), content)
            for host, (code, _, err) in done.items():
                if code == 0:
                    continue
                if not self._reached and any(words in err for words in _HOPELESS):
                    raise Exit(WRONG_CONFIG, f"{host}: {err.strip()}")
                log.warning("%s: %s", host, err.strip())
            if any(code for code, _, _ in done.values()):
                return False
        self._reached = True
        return True

    def _shared(self) -> bool:
        """Return whether all hosts see the run's folder; False: some do not answer.

        Raises:
            Exit: a host has no such folder: its processes would be a run of their own.
        """
        if "://" in self._submission.run_dir:
            return True
        record = shlex.quote(str(self._submission.folder / RECORD))
        done = self._on_all(lambda _: f"test -e {record} && echo yes || echo no")
        for host, (_, out, _) in done.items():
            if out.strip() == b"no":
                folder = self._submission.run_dir
                wrong = (
                    f"{host} does not see {folder}: cluster=ssh wants a folder that "
                )
                wrong += "all hosts and this machine share; run.dir=, or s3:// or gs://"
                raise Exit(WRONG_CONFIG, wrong)
        return all(out.strip() == b"yes" for _, out, _ in done.values())

    def _start(self) -> Mapping[str, State]:
        line = {
            host: start_line(self._name, self._cluster, number)
            for number, host in enumerate(self._cluster.hosts)
        }
        return _states(self._on_all(line.__getitem__))

    def ask(self, verb: str, *words: str | int) -> Mapping[str, State]:
        """Run a verb of run.sh on all hosts."""
        return _states(self._run(verb, *words))

    def _run(self, verb: str, *words: str | int) -> dict[str, tuple[int, bytes, str]]:
        each = self._cluster.processes_per_node
        number = {host: n * each for n, host in enumerate(self._cluster.hosts)}

        def line(host: str) -> str:
            return run_words(self._name, verb, number[host], each, *words)

        return self._on_all(line)

    def said(self, without: int) -> bytes:
        """Return what process 0 has said."""
        line = run_words(self._name, "said", 0, without)
        host = self._cluster.hosts[0]
        return run_captured(ssh_command(self._cluster, host, line))[1]

    def tail(self, code: int) -> str:
        """Return the last lines of those that ended so."""
        said = self._run("tail", code).values()
        return b"".join(out for _, out, _ in said).decode(errors="replace")

    def gone(self) -> bool:
        """Hosts may always come back."""
        return False

    def _on_all(
        self, line: Callable[[str], str], stdin: bytes = b""
    ) -> dict[str, tuple[int, bytes, str]]:
        """Run a line of shell on each host, on many at once."""
        hosts = self._cluster.hosts

        def run(host: str) -> tuple[int, bytes, str]:
            command = ssh_command(self._cluster, host, line(host))
            return run_captured(command, stdin=stdin)

        with ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as pool:
            return dict(zip(hosts, pool.map(run, hosts), strict=True))


def _states(said: Mapping[str, tuple[int, bytes, str]]) -> dict[str, State]:
    found = {}
    for _, out, _ in said.values():
        found |= read_states(out.decode(errors="replace"))
    return found
