"""The actions of local, ssh and tpu_vm, which use a supervisor on this machine.

The supervisor runs in the foreground or, with `cluster.detach`, in the background. If
the supervisor died, `action=resume` starts another.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from launch.config import KINDS, LocalCluster, SshCluster, TpuVmCluster
from launch.config.clusters import Code
from launch.job import Job, Rendered
from launch.node import STOP, asked_to_stop
from launch.remote.attempt import RemoteAttempt
from launch.remote.ssh_hosts import SshHosts
from launch.remote.tpu_hosts import TpuHosts
from launch.submissions import Submission
from launch.supervisor import ATTEMPTS, Attempt, Supervisor, describe_attempts, run_step
from train.liveness import Process

LOG = "process-0.log"


def supervise(
    job: Job,
    cluster: LocalCluster | SshCluster | TpuVmCluster,
    submission: Submission,
    start: Callable[[Path, bool], Attempt],
    on_end: Callable[[], object] = lambda: None,
) -> int:
    """Supervise the run until it is over; return its exit code.

    `start(folder, show)` begins an attempt. The attempt writes its output to files in
    `folder` and, if `show`, also prints the output of process 0.
    """
    folder = submission.local_folder()
    if cluster.detach and not detach_process(folder / "launch.log"):
        print(f"in the background; action=logs follow=true shows {folder}/{LOG}")
        return 0
    submission.with_handle(**asdict(Process.current()), folder=str(folder))
    return Supervisor(
        start=lambda: start(folder, not cluster.detach),
        read_step=partial(run_step, job),
        max_restarts=cluster.max_restarts,
        backoff_s=cluster.backoff_s,
        diary=folder / ATTEMPTS,
        on_end=on_end,
        stop_requested=partial(asked_to_stop, submission.folder),
    ).run()


def submit(
    job: Job,
    cluster: SshCluster | TpuVmCluster,
    rendered: Rendered,
    submission: Submission,
) -> int:
    """Supervise a run on other machines. The first attempt may find it running."""
    submission = submission.with_handle(cluster=asdict(cluster))
    hosts = submitted_hosts(submission)
    watch_flags = iter([True])

    def start(folder: Path, show: bool) -> RemoteAttempt:
        begin = partial(hosts.begin, watch_running=next(watch_flags, False))
        return RemoteAttempt(hosts, folder / LOG, begin, show)

    return supervise(job, cluster, submission, start, hosts.release)


def detach_process(log: Path) -> bool:
    """Fork; return True in the new background process, which writes to `log`."""
    sys.stdout.flush()
    if child := os.fork():
        _, status = os.waitpid(child, 0)  # the child exits after the second fork
        assert status == 0
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    with log.open("ab") as file, Path(os.devnull).open("rb") as null_device:
        os.dup2(null_device.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return True


def submitted_hosts(submission: Submission) -> Any:
    """Return the `Hosts` of a submission; None if the run is on this machine."""
    host_classes = {"ssh": SshHosts, "tpu_vm": TpuHosts}
    if submission.kind not in host_classes:
        return None
    settings = dict(submission.handle["cluster"])
    cluster = KINDS[submission.kind](**{**settings, "code": Code(settings["code"])})
    return host_classes[submission.kind](submission, cluster)


def alive(submission: Submission) -> bool:
    """Return whether a supervisor of the submission runs on this machine."""
    process = Process.from_dict(submission.handle)
    return process is not None and bool(process.alive())


def status(submission: Submission) -> list[str]:
    """Describe the supervisor, and how the attempts ended."""
    handle = submission.handle
    supervisor = f"process {handle.get('pid')} on {handle.get('host')}"
    state = f"kept running by {supervisor}"
    if not alive(submission):
        state = f"not kept running: {supervisor} has ended, or is on another machine; "
        state += "action=resume starts another"
    return [state, *describe_attempts(Path(handle.get("folder", "")) / ATTEMPTS)]


def logs(submission: Submission, follow: bool) -> int:
    """Print the output of process 0, from the local log or from its machine."""
    file = Path(submission.handle.get("folder", "")) / LOG
    if file.exists() or alive(submission):
        file.touch()
        with file.open(errors="replace") as text:
            over = False
            while not over:
                over = not (follow and alive(submission))
                print(text.read(), end="", flush=True)
                time.sleep(0 if over else 0.2)
    elif hosts := submitted_hosts(submission):
        print(hosts.output(0).decode(errors="replace"), end="")
    return 0


def stop(submission: Submission) -> int:
    """Stop the run after a save, wait for its end, and release its machines.

    A file `stop` keeps supervisors on other machines from starting the run again.
    """
    (submission.folder / STOP).write_text("")
    if alive(submission):
        os.kill(submission.handle["pid"], signal.SIGINT)
        while alive(submission):
            time.sleep(0.1)
    elif hosts := submitted_hosts(submission):
        if hosts.may_be_running():
            file = submission.local_folder() / LOG
            attempt = RemoteAttempt(hosts, file, begin=lambda wait: True)
            attempt.stop(signal.SIGINT)
            attempt.wait()
        hosts.release()
    return 0
