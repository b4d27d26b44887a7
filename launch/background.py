"""A process that goes on in the background, and how others know that it lives."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def detach_process(log: Path) -> bool:
    """Fork; True in the child, which has no terminal and writes to a file."""
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


def who_am_i() -> dict[str, Any]:
    """Return what `is_alive` needs of this process."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "started": _start_time(pid)}


def is_alive(handle: Mapping[str, Any]) -> bool:
    """Return whether that very process lives; False on any other machine."""
    if handle.get("host") != socket.gethostname():
        return False
    return _start_time(handle["pid"]) == handle["started"] != ""


def end_of(handle: Mapping[str, Any], look_s: float = 0.1) -> None:
    """Wait until that process has ended."""
    while is_alive(handle):
        time.sleep(look_s)


def _start_time(pid: int) -> str:
    """Ask when a process began: numbers of processes are used again; "" for none."""
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    state, _, began = found.partition(" ")
    return "" if state.startswith("Z") else began.strip()
