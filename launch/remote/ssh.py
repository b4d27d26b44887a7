"""`cluster=ssh`: machines that ssh reaches, supervised by this machine.

Training runs in its own session on each machine (`remote/run_script.py`). So training
survives a broken connection, and `action=resume` supervises it again. All machines and
this one share the run's directory and, with cluster.code=shared, this program's folder.
"""

import re
import sys
from dataclasses import replace

from data.errors import Mistake
from launch.config import SshCluster
from launch.config.clusters import Code
from launch.job import Job, Rendered, shell
from launch.plan_check import Machine
from launch.remote import supervise
from launch.remote.run_script import RUN, run_script
from launch.remote.ssh_hosts import ssh_command, start_line, write_line
from launch.remote.supervise import alive, logs, stop, submit  # noqa: F401
from launch.submissions import Submission

SECRETS_REMEDY = (
    "keep it on the hosts: log in there (wandb login), or let cluster.setup read a file"
)


def cluster_mistakes(cluster: SshCluster, run_dir: str) -> list[Mistake]:
    """List the mistakes in the cluster's keys."""
    errors = []
    if not cluster.hosts:
        rule = "must name at least one host, say [node1, me@node2]"
        errors.append(Mistake("cluster.hosts", [], rule))
    for host in [*cluster.hosts, *filter(None, [cluster.address])]:
        if not re.fullmatch(r"[A-Za-z0-9_][\w.@:%-]*", host, re.ASCII):
            rule = "must be a host name or an address, as host or user@host"
            errors.append(Mistake("cluster.hosts", host, rule))
    if len({*cluster.hosts}) < len(cluster.hosts):
        rule = "must differ. Set cluster.processes_per_node to start several on each"
        errors.append(Mistake("cluster.hosts", cluster.hosts, rule))
    if cluster.code is Code.image:
        rule = "must be shared or archive: nothing starts containers here"
        errors.append(Mistake("cluster.code", cluster.code, rule))
    return errors


def machine(cluster: SshCluster) -> Machine:
    """Return an empty `Machine`: the devices of the hosts are not known here."""
    return Machine()


def render(job: Job, cluster: SshCluster) -> Rendered:
    """Return run.sh, and a script that starts it on each host."""
    remote_job = replace(job, folder=".")  # an archive is put next to run.sh
    shared_workdir = job.workdir if cluster.code is Code.shared else None
    script = run_script(
        remote_job.command(cluster.python or sys.executable, cluster.code),
        job.variables(cluster.code),
        setup=cluster.setup,
        workdir=cluster.workdir or shared_workdir,
    )
    lines = []
    for number, host in enumerate(cluster.hosts):
        copy = ssh_command(cluster, host, write_line(job.name, RUN))
        start = ssh_command(cluster, host, start_line(job.name, cluster, number))
        lines += [f"{shell(copy)} <{RUN}", shell(start)]
    command = ["bash", "ssh.sh"]
    return Rendered({RUN: script, "ssh.sh": "\n".join(lines) + "\n"}, command)


def status(submission: Submission) -> list[str]:
    """Describe the supervisor, past attempts, and the processes on the hosts."""
    hosts = supervise.submitted_hosts(submission)
    states = hosts.ask("poll")
    lines = [
        f"{name}: {' '.join(map(str, filter(None, s)))}" for name, s in states.items()
    ]
    num_silent = hosts.processes - len(states)
    lines += [f"{num_silent} processes: no answer"] * bool(num_silent)
    return [*supervise.status(submission), *lines]
