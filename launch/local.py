"""`cluster=local`: processes of this machine, supervised by this command.

Several processes find each other by torchrun's variables, and each uses one GPU.
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
from typing import Any

from data.errors import Mistake
from data.storage import check_regular
from launch.config import LocalCluster
from launch.job import Job, Rendered, export_lines, shell
from launch.job_secret import MAKE_SECRET_LINE, secret_variable
from launch.plan_check import Machine
from launch.remote.supervise import alive, logs, status, supervise  # noqa: F401
from launch.remote.supervise import stop as stop_supervisor
from launch.submissions import Submission
from launch.subprocesses import ProcessGroup, torchrun_variables
from train.errors import FINISHED
from train.liveness import Process

log = logging.getLogger(__name__)

SECRETS_REMEDY = "set it in the environment that you type this command in"
_PROCESSES = "processes.json"  # records the processes of the last attempt


def cluster_mistakes(cluster: LocalCluster, run_dir: str) -> list[Mistake]:
    """Return no mistakes: there are no rules beyond the declared bounds of each key."""
    return []


def machine(cluster: LocalCluster) -> Machine:
    """Return an empty `Machine`: training makes the same checks on this machine."""
    return Machine()


def render(job: Job, cluster: LocalCluster) -> Rendered:
    """Return a script that starts all processes once."""
    command = shell(job.command(sys.executable))
    lines = ["#!/usr/bin/env bash", f"cd {shell([job.workdir])}"]
    lines += export_lines(job.variables())
    lines += [MAKE_SECRET_LINE] * (cluster.processes > 1)
    for process in range(cluster.processes):
        variables = _torchrun_variables(process, cluster.processes, port=29500)
        words = [f"{name}={value}" for name, value in variables.items()]
        lines.append(" ".join([*words, command]) + " &" * (cluster.processes > 1))
    lines += ["wait"] * (cluster.processes > 1)
    return Rendered({"local.sh": "\n".join(lines) + "\n"}, ["bash", "local.sh"])


def submit(
    job: Job, cluster: LocalCluster, rendered: Rendered, submission: Submission
) -> int:
    """Start the processes, and restart them until the run is over."""
    return supervise(job, cluster, submission, partial(_Attempt, job, cluster))


def stop(submission: Submission) -> int:
    """Stop the run after a save, even if its supervisor has died; wait for the end."""
    was_supervised = alive(submission)
    stop_supervisor(submission)
    remaining = _remaining_processes(submission)
    if not (was_supervised or remaining):
        host = submission.handle.get("host")
        log.warning("nothing of it runs on this machine; it was started on %s", host)
    for process in remaining:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
    while any(process.alive() for process in remaining):
        time.sleep(0.1)
    return FINISHED


def _remaining_processes(submission: Submission) -> list[Process]:
    """Return the processes of each submission's last attempt that are still alive."""
    files = submission.local_folder().parent.glob(f"*/{_PROCESSES}")
    records = [values for file in files for values in _read_processes(file)]
    processes = filter(None, map(Process.from_dict, records))
    return [process for process in processes if process.alive()]


def _read_processes(file: Path) -> list[Any]:
    """Return the processes in a file; none, with a warning, if it is damaged."""
    try:
        check_regular(file)
        processes = json.loads(file.read_text())
        return processes if isinstance(processes, list) else []
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s: does not say which processes it started: %s", file, error)
        return []


class _Attempt:
    """One start of all processes. Each process has its own log file and session."""

    def __init__(self, job: Job, cluster: LocalCluster, folder: Path, show: bool):
        port = _free_port()
        self._processes = ProcessGroup()
        secret = secret_variable(cluster.processes)
        self._output = _log_path(folder, 0).open("ab+") if show else None
        for process in range(cluster.processes):
            variables = _torchrun_variables(process, cluster.processes, port)
            with _log_path(folder, process).open("ab") as file:
                self._processes.add(
                    job.command(sys.executable),
                    env={**os.environ, **job.variables(), **variables, **secret},
                    cwd=job.workdir,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # Ctrl-C reaches only the supervisor
                )
        records = [asdict(Process.of(p.pid)) for p in self._processes.processes]
        (folder / _PROCESSES).write_text(json.dumps(records))

    def wait(self) -> Sequence[int | None]:
        """Wait for all processes; show the output of process 0; return exit codes."""
        return self._processes.wait(self._show_output)

    def stop(self, number: int) -> None:
        """Send a signal to all processes, which then agree on the last step."""
        self._processes.send_signal(number)

    def _show_output(self) -> None:
        if self._output is not None:
            sys.stderr.buffer.write(self._output.read())
            sys.stderr.flush()


def _log_path(folder: Path, process: int) -> Path:
    return folder / f"process-{process}.log"


def _torchrun_variables(process: int, processes: int, port: int) -> dict[str, str]:
    """Return all of torchrun's variables, or none for a single process."""
    if processes == 1:
        return {}
    variables = {"WORLD_SIZE": f"{processes}", "MASTER_ADDR": "localhost"}
    ranks = torchrun_variables(process, processes)
    return {**ranks, **variables, "MASTER_PORT": f"{port}"}


def _free_port() -> int:
    """Return a port that is free now, so that runs on one machine do not collide."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
