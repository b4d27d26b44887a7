"""A process that goes on in the background, and how others know that it lives."""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from train.run.liveness import Process


def detach_process(log: Path) -> bool:
    """Fork; return True in the child, which has no terminal and writes to a file."""
    sys.stdout.flush()
    if child := os.fork():
        _, status = os.waitpid(child, 0)  # the middle one, which leaves at once
        assert status == 0
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    with log.open("ab") as file, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return True


def process_handle() -> dict[str, Any]:
    """Return what `is_alive` needs of this process."""
    return asdict(Process.current())


def is_alive(handle: Mapping[str, Any]) -> bool:
    """Return whether that very process lives; False on any other machine."""
    process = Process.from_dict(handle)
    return process is not None and bool(process.alive())


def wait_for_end(handle: Mapping[str, Any], poll_s: float = 0.1) -> None:
    """Wait until that process has ended."""
    while is_alive(handle):
        time.sleep(poll_s)
