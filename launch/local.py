"""`cluster=local`: processes of this machine, kept running from here.

One process trains as `python -m train` does; several find each other by torchrun's
variables, and on GPUs take one each.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from launch.background import end_of, go_to_background, is_alive, who_am_i
from launch.config import LocalCluster
from launch.gate import Machine
from launch.job import Job, Rendered, exports, shell
from launch.records import Record
from launch.supervisor import ATTEMPTS, Supervisor, newest_step, said_of_attempts
from train.config import Mistake

log = logging.getLogger(__name__)

WHERE_SECRETS_GO = "set it in the environment that you type this command in"
_LOOK_S = 0.05
_OTHERS_S = 600.0  # after one has ended: heartbeat, watchdog and a save are within it


def mistakes(cluster: LocalCluster, run_dir: str) -> list[Mistake]:
    """List what is wrong with the cluster's keys."""
    if cluster.processes < 1:
        return [Mistake("cluster.processes", cluster.processes, "must be at least 1")]
    return []


def machine(cluster: LocalCluster) -> Machine:
    """Nothing to plan for: training says the same on this very machine."""
    return Machine()


def render(job: Job, cluster: LocalCluster) -> Rendered:
    """Give a script that starts all processes once."""
    command = shell(job.command(sys.executable))
    lines = ["#!/usr/bin/env bash", f"cd {shell([job.workdir])}"]
    lines += exports(job.variables())
    for process in range(cluster.processes):
        place = _place(process, cluster.processes, port=29500)
        both = [f"{name}={value}" for name, value in place.items()]
        lines.append(" ".join([*both, command]) + " &" * (cluster.processes > 1))
    lines += ["wait"] * (cluster.processes > 1)
    return Rendered({"local.sh": "\n".join(lines) + "\n"}, ["bash", "local.sh"])


def submit(job: Job, cluster: LocalCluster, rendered: Rendered, record: Record) -> int:
    """Start the processes, and keep them going to the end."""
    folder = record.local_folder()
    if cluster.detach and not go_to_background(folder / "launch.log"):
        print(f"in the background: action=logs shows {_log(folder, 0)}")
        return 0
    record = record.with_handle(**who_am_i(), folder=str(folder))
    show = not cluster.detach
    return Supervisor(
        start=partial(_Processes, job, cluster, folder, show),
        step=partial(newest_step, job),
        max_restarts=cluster.max_restarts,
        backoff_s=cluster.backoff_s,
        diary=folder / ATTEMPTS,
    ).run()


def status(record: Record) -> list[str]:
    """Say whether it is being kept running, and how its attempts ended."""
    state = "running" if is_alive(record.handle) else "not running"
    about = f"{state}: process {record.handle['pid']} on {record.handle['host']}"
    return [about, *said_of_attempts(Path(record.handle["folder"]) / ATTEMPTS)]


def alive(record: Record) -> bool:
    """Say whether it is being kept running."""
    return is_alive(record.handle)


def logs(record: Record, follow: bool) -> int:
    """Print what process 0 says."""
    file = _log(Path(record.handle["folder"]), 0)
    with file.open(errors="replace") as text:
        while True:
            over = not (follow and is_alive(record.handle))
            print(text.read(), end="", flush=True)
            if over:
                return 0
            time.sleep(0.2)


def stop(record: Record) -> int:
    """Let the run save and stop, and wait until it has."""
    if is_alive(record.handle):
        os.kill(record.handle["pid"], signal.SIGINT)
        end_of(record.handle)
    return 0


class _Processes:
    """One start of all processes; each writes to a file, and outlives us if need be."""

    def __init__(self, job: Job, cluster: LocalCluster, folder: Path, show: bool):
        port = _free_port()
        self._said = _log(folder, 0).open("ab+") if show else None
        self._processes: list[subprocess.Popen[bytes]] = []
        for process in range(cluster.processes):
            place = _place(process, cluster.processes, port)
            with _log(folder, process).open("ab") as file:
                self._processes.append(
                    subprocess.Popen(
                        job.command(sys.executable),
                        env={**os.environ, **job.variables(), **place},
                        cwd=job.workdir,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C comes to us alone
                    )
                )

    def wait(self) -> Sequence[int | None]:
        """Wait for all; once one has ended the others have some time."""
        patience_s = _OTHERS_S
        while None in (codes := [process.poll() for process in self._processes]):
            self._show()
            if any(code is not None for code in codes):
                patience_s -= _LOOK_S
                if patience_s < 0:
                    log.warning("some do not end after another has: killed")
                    self.stop(signal.SIGKILL)
            time.sleep(_LOOK_S)
        self._show()
        return [_as_shell(process.returncode) for process in self._processes]

    def stop(self, number: int) -> None:
        """Ask all: they agree on the step."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _show(self) -> None:
        """Print what process 0 has said since."""
        if self._said is not None:
            sys.stderr.buffer.write(self._said.read())
            sys.stderr.flush()


def _log(folder: Path, process: int) -> Path:
    return folder / f"process-{process}.log"


def _place(process: int, processes: int, port: int) -> dict[str, str]:
    """Give torchrun's variables; none for a process alone."""
    if processes == 1:
        return {}
    numbers = {"RANK": process, "LOCAL_RANK": process}
    numbers |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    place = {name: str(number) for name, number in numbers.items()}
    return {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def _free_port() -> int:
    """Find a port; another for each start, so that two runs are not in the way."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _as_shell(code: int) -> int:
    """Give 134 for an abort, as a shell has it."""
    return 128 - code if code < 0 else code
