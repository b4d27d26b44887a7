"""`cluster=local`: processes of this machine, kept running from here.

Several find each other by torchrun's variables, and on GPUs take one each.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from launch.config import LocalCluster
from launch.job import Job, Rendered, exports, shell
from launch.plan_check import Machine
from launch.remote.supervise import alive, logs, status, supervise  # noqa: F401
from launch.remote.supervise import stop as stop_supervisor
from launch.submissions import Submission
from launch.subprocesses import ProcessGroup, torchrun_variables
from train.errors import FINISHED, Mistake
from train.run.liveness import Process

log = logging.getLogger(__name__)

SECRETS_REMEDY = "set it in the environment that you type this command in"
_PROCESSES = "processes.json"  # the processes of the last attempt


def mistakes(cluster: LocalCluster, run_dir: str) -> list[Mistake]:
    """Return no mistakes: the bounds of each key are checked already."""
    return []


def machine(cluster: LocalCluster) -> Machine:
    """Return nothing to plan for: training says the same on this very machine."""
    return Machine()


def render(job: Job, cluster: LocalCluster) -> Rendered:
    """Return a script that starts all processes once."""
    command = shell(job.command(sys.executable))
    lines = ["#!/usr/bin/env bash", f"cd {shell([job.workdir])}"]
    lines += exports(job.variables())
    for process in range(cluster.processes):
        variables = _place(process, cluster.processes, port=29500)
        words = [f"{name}={value}" for name, value in variables.items()]
        lines.append(" ".join([*words, command]) + " &" * (cluster.processes > 1))
    lines += ["wait"] * (cluster.processes > 1)
    return Rendered({"local.sh": "\n".join(lines) + "\n"}, ["bash", "local.sh"])


def submit(
    job: Job, cluster: LocalCluster, rendered: Rendered, submission: Submission
) -> int:
    """Start the processes, and keep them going to the end."""
    return supervise(job, cluster, submission, partial(_Attempt, job, cluster))


def stop(submission: Submission) -> int:
    """Let the run save and stop, and wait until it has, also without a supervisor."""
    kept_running = alive(submission)
    stop_supervisor(submission)
    remaining = _left(submission)
    if not (kept_running or remaining):
        host = submission.handle.get("host")
        log.warning("nothing of it runs on this machine; it was started on %s", host)
    for process in remaining:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    while any(process.alive() for process in remaining):
        time.sleep(0.1)
    return FINISHED


def _left(submission: Submission) -> list[Process]:
    """Return the run's processes that outlived a supervisor, of any submission."""
    files = submission.local_folder().parent.glob(f"*/{_PROCESSES}")
    records = [values for file in files for values in json.loads(file.read_text())]
    processes = filter(None, map(Process.from_dict, records))
    return [process for process in processes if process.alive()]


class _Attempt:
    """One start of all processes; each writes to a file, and outlives us if need be."""

    def __init__(self, job: Job, cluster: LocalCluster, folder: Path, show: bool):
        port, self._processes = _free_port(), ProcessGroup()
        self._output = _log(folder, 0).open("ab+") if show else None
        for process in range(cluster.processes):
            own = _place(process, cluster.processes, port)
            with _log(folder, process).open("ab") as file:
                self._processes.add(
                    job.command(sys.executable),
                    env={**os.environ, **job.variables(), **own},
                    cwd=job.workdir,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # Ctrl-C comes to us alone
                )
        started = [asdict(Process.of(p.pid)) for p in self._processes.processes]
        (folder / _PROCESSES).write_text(json.dumps(started))

    def wait(self) -> Sequence[int | None]:
        """Wait for all, and show what process 0 writes."""
        return self._processes.wait(self._show)

    def stop(self, number: int) -> None:
        """Signal all: they agree on the step."""
        self._processes.send_signal(number)

    def _show(self) -> None:
        if self._output is not None:
            sys.stderr.buffer.write(self._output.read())
            sys.stderr.flush()


def _log(folder: Path, process: int) -> Path:
    return folder / f"process-{process}.log"


def _place(process: int, processes: int, port: int) -> dict[str, str]:
    """Return all of torchrun's variables; none for a process alone."""
    if processes == 1:
        return {}
    variables = {"WORLD_SIZE": f"{processes}", "MASTER_ADDR": "localhost"}
    torchrun = torchrun_variables(process, processes)
    return {**torchrun, **variables, "MASTER_PORT": f"{port}"}


def _free_port() -> int:
    """Return a free port, another for each start: two runs are not in the way."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
