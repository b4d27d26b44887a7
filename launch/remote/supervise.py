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

from launch.background import end_of, go_to_background, is_alive, who_am_i
from launch.config import KINDS, Code, LocalCluster, SshCluster, TpuVmCluster
from launch.job import Job
from launch.remote.attempt import Hosts, Watch
from launch.submissions import Record
from launch.supervisor import (
    ATTEMPTS,
    SIGNALS,
    Attempt,
    Supervisor,
    newest_step,
    said_of_attempts,
)

LOG = "process-0.log"


def supervise(
    job: Job,
    cluster: LocalCluster | SshCluster | TpuVmCluster,
    record: Record,
    start: Callable[[Path, bool], Attempt],
    over: Callable[[], object] = lambda: None,
) -> int:
    """Keep the run going to its end; give its exit code.

    Args:
        job: what is to run.
        cluster: its keys.
        record: of the submission.
        start: begins an attempt, which writes to files in this folder, and shows what
            process 0 says if told to.
        over: called at the end, however that comes about.
    """
    folder = record.local_folder()
    if cluster.detach and not go_to_background(folder / "launch.log"):
        print(f"in the background; action=logs follow=true shows {folder}/{LOG}")
        return 0
    record.with_handle(**who_am_i(), folder=str(folder))
    try:
        return Supervisor(
            start=lambda: start(folder, not cluster.detach),
            step=partial(newest_step, job),
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


def watching(
    hosts: Hosts, cluster: SshCluster | TpuVmCluster
) -> Callable[[Path, bool], Watch]:
    """Give what begins attempts on other machines; the first takes up what runs."""
    first = iter([True])

    def start(folder: Path, show: bool) -> Watch:
        take_up = next(first, False)
        return Watch(hosts, folder / LOG, cluster.poll_s, take_up=take_up, show=show)

    return start


def said_of(record: Record) -> list[str]:
    """Say whether it is being kept running from here, and how its attempts ended."""
    handle = record.handle
    where = f"process {handle.get('pid')} on {handle.get('host')}"
    state = f"kept running by {where}"
    if not is_alive(handle):
        state = f"not kept running: {where} is over, or not of this machine; "
        state += "action=resume goes on"
    return [state, *said_of_attempts(Path(handle.get("folder", "")) / ATTEMPTS)]


def kept_keys(record: Record) -> Any:
    """Give the cluster's keys that the job was submitted with."""
    kept = dict(record.handle["cluster"])
    return KINDS[record.kind](**{**kept, "code": Code(kept["code"])})


def print_log(record: Record, follow: bool) -> bool:
    """Print what process 0 has said; False if nothing of it is known here."""
    file = Path(record.handle.get("folder", "")) / LOG
    if not (file.exists() or is_alive(record.handle)):
        return False
    file.touch()
    with file.open(errors="replace") as text:
        while True:
            over = not (follow and is_alive(record.handle))
            print(text.read(), end="", flush=True)
            if over:
                return True
            time.sleep(0.2)


def alive(record: Record) -> bool:
    """Say whether it is being kept running from this machine."""
    return is_alive(record.handle)


def stop_watcher(record: Record) -> bool:
    """Let the supervisor stop the run, and wait; False if it does not live here."""
    if not is_alive(record.handle):
        return False
    os.kill(record.handle["pid"], signal.SIGINT)
    end_of(record.handle)
    return True
