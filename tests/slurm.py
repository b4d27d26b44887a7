"""A Slurm of two nodes on this machine, on the loopback network."""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
CONF = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
# What a job that goes back into the queue waits for is the life of its credential.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
# Names that resolve everywhere: process 0 is found by the first.
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=2
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
# Its jobs take the nodes of the others'.
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=INFINITE State=UP
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
"""


@contextlib.contextmanager
def loopback() -> Iterator[dict[str, str]]:
    """Run Slurm; yield the variable that locates it."""
    if os.geteuid() or not all(map(shutil.which, PROGRAMS)):
        pytest.skip("needs Slurm, MUNGE (Debian: slurm-wlm, munge) and to be root")
    with contextlib.ExitStack() as stack:
        # Run one Slurm at a time: if one of two on a host ends, the other loses jobs.
        lock = stack.enter_context(Path("/run/longhaul-slurm.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        # MUNGE trusts only folders that others may not write, unlike /tmp/pytest-*.
        folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/run"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "key").chmod(0o600)
        port = free_port()
        values = {"host": socket.gethostname().partition(".")[0], "user": "root"}
        values |= {"folder": folder, "port": port, "ports": f"[{port + 1}-{port + 2}]"}
        (folder / "slurm.conf").write_text(CONF.format(**values))
        munge = [f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
        munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log")]
        variables = {"SLURM_CONF": f"{folder}/slurm.conf"}
        env = {**os.environ, **variables}
        for daemon in (
            ["munged", "--foreground", *munge, f"--seed-file={folder}/seed"],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "127.0.0.1"],
            ["slurmd", "-D", "-N", "127.0.0.2"],
        ):
            with (folder / f"{daemon[0]}.said").open("ab") as log:
                process = subprocess.Popen(daemon, env=env, stdout=log, stderr=log)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        deadline = time.monotonic() + 60
        probe = ["srun", "-N2", "-n2", "--immediate=2", "true"]
        while subprocess.run(probe, env=env, capture_output=True).returncode:
            outputs = "\n".join(p.read_text() for p in folder.glob("*.said"))
            assert time.monotonic() < deadline, outputs
            time.sleep(0.2)
        try:
            yield variables
        finally:  # a failed test may have left jobs
            subprocess.run(["scancel", "--full", "--user=root"], env=env, check=False)
