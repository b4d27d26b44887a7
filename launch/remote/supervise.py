"""What local, ssh and tpu_vm have in common: a supervisor on this machine, its verbs.

It lives on the machine where the job was submitted, in the foreground or, with
`cluster.detach`, behind it. Where it lives no more, `action=resume` begins another.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from launch.background import detach_process, is_alive, process_handle, wait_for_end
from launch.config import KINDS, Code, LocalCluster, SshCluster, TpuVmCluster
from launch.job import Job
from launch.remote.attempt import Hosts, RemoteAttempt
from launch.submissions import Submission
from launch.supervisor import (
    ATTEMPTS,
    SIGNALS,
    Attempt,
    Supervisor,
    describe_attempts,
    run_step,
)

LOG = "process-0.log"


def supervise(
    job: Job,
    cluster: LocalCluster | SshCluster | TpuVmCluster,
    submission: Submission,
    start: Callable[[Path, bool], Attempt],
    over: Callable[[], object] = lambda: None,
) -> int:
    """Keep the run going to its end; return its exit code.

    Args:
        job: what is to run.
        cluster: its keys.
        submission: of the submission.
        start: begins an attempt, which writes to files in this folder, and shows what
            process 0 says if told to.
        over: called at the end, however that comes about.
    """
    folder = submission.local_folder()
    if cluster.detach and not detach_process(folder / "launch.log"):
        print(f"in the background; action=logs follow=true shows {folder}/{LOG}")
        return 0
    submission.with_handle(**process_handle(), folder=str(folder))
    try:
        return Supervisor(
            start=lambda: start(folder, not cluster.detach),
            step=partial(run_step, job),
            max_restarts=cluster.max_restarts,
            backoff_s=cluster.backoff_s,
            diary=folder / ATTEMPTS,
        ).run()
    finally:
        # Who presses Ctrl-C twice would else leave machines that cost money.
        before = [(n, signal.signal(n, signal.SIG_IGN)) for n in SIGNALS]
        over()
        for number, handler in before:
            signal.signal(number, handler)


def attempt_starter(
    hosts: Hosts, cluster: SshCluster | TpuVmCluster
) -> Callable[[Path, bool], RemoteAttempt]:
    """Return what begins attempts on other machines; the first takes up what runs."""
    first = iter([True])

    def start(folder: Path, show: bool) -> RemoteAttempt:
        take_up = next(first, False)
        return RemoteAttempt(
            hosts, folder / LOG, cluster.poll_s, take_up=take_up, show=show
        )

    return start


def describe_supervisor(submission: Submission) -> list[str]:
    """Return whether it is being kept running from here, and how its attempts ended."""
    handle = submission.handle
    where = f"process {handle.get('pid')} on {handle.get('host')}"
    state = f"kept running by {where}"
    if not is_alive(handle):
        state = f"not kept running: {where} is over, or not of this machine; "
        state += "action=resume goes on"
    return [state, *describe_attempts(Path(handle.get("folder", "")) / ATTEMPTS)]


def submitted_cluster(submission: Submission) -> Any:
    """Return the cluster's keys that the job was submitted with."""
    kept = dict(submission.handle["cluster"])
    return KINDS[submission.kind](**{**kept, "code": Code(kept["code"])})


def print_log(submission: Submission, follow: bool) -> bool:
    """Print what process 0 has said; False if nothing of it is known here."""
    file = Path(submission.handle.get("folder", "")) / LOG
    if not (file.exists() or is_alive(submission.handle)):
        return False
    file.touch()
    with file.open(errors="replace") as text:
        while True:
            over = not (follow and is_alive(submission.handle))
            print(text.read(), end="", flush=True)
            if over:
                return True
            time.sleep(0.2)


def alive(submission: Submission) -> bool:
    """Return whether it is being kept running from this machine."""
    return is_alive(submission.handle)


def stop_supervisor(submission: Submission) -> bool:
    """Let the supervisor stop the run, and wait; False if it does not live here."""
    if not is_alive(submission.handle):
        return False
    os.kill(submission.handle["pid"], signal.SIGINT)
    wait_for_end(submission.handle)
    return True
