"""`cluster=ssh` with real training over OpenSSH, on two hosts of the loopback."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drills.ground import check_equal
from tests.fleet import free_port
from tests.launch.launched import LaunchedRun

pytestmark = pytest.mark.slow

HOSTS = ("n0", "n1")
STEPS = 1_500
SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
LoginGraceTime 600
MaxStartups 100
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
ForceCommand export HOME={home}; cd; exec bash -c "$SSH_ORIGINAL_COMMAND"
"""
CLIENT = """
Host {host}
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


class Servers:
    """One sshd for each host, each with its own home folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._running = dict[str, subprocess.Popen[bytes]]()
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/key"]
        subprocess.run(key, check=True)
        for host in HOSTS:
            fields = {"host": host, "port": free_port(), "home": folder / host}
            (folder / host).mkdir()
            text = SERVER.format(folder=folder, **fields)
            (folder / f"{host}.sshd").write_text(text)
            with (folder / "config").open("a") as config:
                config.write(CLIENT.format(folder=folder, **fields))
            self.start(host)

    def start(self, host: str) -> None:
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        config = f"{self.folder}/{host}.sshd"
        with (self.folder / f"{host}.said").open("ab") as log:
            self._running[host] = subprocess.Popen(
                [sshd, "-D", "-e", "-f", config], stdout=log, stderr=log
            )
        reach = ["ssh", "-F", f"{self.folder}/config", "-o", "BatchMode=yes", host]
        deadline = time.monotonic() + 300
        while subprocess.run([*reach, "true"], capture_output=True).returncode:
            log = (self.folder / f"{host}.said").read_text()
            assert time.monotonic() < deadline, log
            time.sleep(0.1)

    def end(self, host: str) -> None:
        self._running[host].terminate()
        self._running[host].wait()

    def process(self, rank: int) -> int:
        """Return the process id of a rank."""
        [file] = self.folder.glob(f"{HOSTS[rank]}/longhaul/*/process-{rank}/pid")
        return int(file.read_text())


@pytest.fixture
def servers(tmp_path) -> Iterator[Servers]:
    if not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()):
        pytest.skip("needs OpenSSH's server (Debian: openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder = tmp_path / "ssh"
    folder.mkdir()
    servers = Servers(folder)
    yield servers
    for host in HOSTS:
        servers.end(host)
    for file in folder.glob("*/longhaul/*/process-*/pid"):
        try:
            os.kill(int(file.read_text()), signal.SIGKILL)
        except OSError:
            continue


def test_killed_cut_off_orphaned_stopped_and_resumed(servers, tmp_path):
    """The curve and the arrays equal those of an undisturbed run.

    A step takes half a second until the last command. Otherwise the run could end
    before the commands on a machine where commands are slow and steps are fast.
    """
    quick = tmp_path / "quick"
    kind = (
        *("cluster=ssh", f"cluster.hosts=[{','.join(HOSTS)}]", "cluster.poll_s=0.3"),
        *(f"cluster.options=[-F,{servers.folder}/config]", "cluster.address=localhost"),
        *(f"cluster.port={free_port()}", "cluster.code=archive"),
        "runtime.allow_fault_injection=true",
    )
    pace = f"LONGHAUL_DRILL: 'pace:0.5:{quick}'"
    caches = f"{{XDG_CACHE_HOME: {tmp_path}/cache, JAX_PLATFORMS: cpu, {pace}}}"
    run = LaunchedRun(
        *(tmp_path / "x", *kind, "cluster.detach=true"),
        f"cluster.environment={caches}",
        num_steps=STEPS,
    )
    run.submit()
    run.await_steps()
    os.kill(servers.process(1), signal.SIGKILL)
    run.await_attempts()
    run.await_steps()
    assert "137" in run.verb("status")

    pids = [servers.process(rank) for rank in range(2)]
    servers.end("n1")  # the host cannot be reached for a while
    run.await_steps()
    assert "1 processes: no answer" in run.verb("status")
    servers.start("n1")
    run.kill_supervisor(1)  # the machine that watches goes down
    run.await_steps()
    run.verb("resume")
    run.await_that(lambda: (run.submission(2) / "process-0.log").exists())
    run.await_steps()
    assert [servers.process(rank) for rank in range(2)] == pids

    run.verb("stop")
    stop_step = run.run.step
    assert run.run.sealed()[-1] == stop_step < STEPS
    assert "130, 130: the last" in run.verb("status")
    quick.touch()
    run.verb("resume")
    assert f"finished    {STEPS:,} steps" in run.verb("logs", "follow=true")
    check_equal(run.run, run.straight(2), STEPS)
