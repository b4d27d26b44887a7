"""Identify a process, so that another process can later tell whether it lives.

A PID alone is not enough: PIDs are reused, and mean nothing on another machine or in
another container. So the identity consists of the machine (its boot and PID namespace),
the PID, and the start time of the process. This module imports only the standard
library.
"""

import dataclasses
import datetime
import json
import os
import secrets
import socket
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_UNKNOWN = "unknown"
_PROC = Path("/proc")
_ENDED_STATES = ("Z", "X")  # zombie, dead (proc_pid_stat(5)): ended, but not waited for


@dataclass(frozen=True)
class Process:
    """The identity of a process.

    machine: the boot and the PID namespace that `pid` and `start` refer to; None if
        unknown.
    start: the start time, in ticks since the boot, or as `ps` prints it on macOS; None
        if it is hidden.
    """

    host: str
    machine: str | None
    pid: int
    start: int | str | None

    @classmethod
    def current(cls) -> "Process":
        """Describe the calling process."""
        return Process.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Describe a process of this machine."""
        return Process(socket.gethostname(), _machine(), pid, state_and_start(pid)[1])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Process | None":
        """Return the process that the values describe; None if they do not."""
        try:
            fields = dataclasses.fields(Process)
            process = Process(**{field.name: values[field.name] for field in fields})
        except (KeyError, TypeError):
            return None
        return process if _is_pid(process.pid) else None

    def alive(self) -> bool | None:
        """Return whether the process lives; None if this machine cannot tell.

        A stopped process lives. A zombie does not.
        """
        if self.machine is None or self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)  # works even if /proc hides other users' processes
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        state, start = state_and_start(self.pid)
        if start is None or self.start is None:
            return None
        return start == self.start and state not in _ENDED_STATES


@dataclass(frozen=True)
class Owner(Process):
    """A process that owns, or owned, a run.

    token: a random name that only this process writes.
    since: when the process took the lease; only displayed, never compared.
    beat: the number of times that it has renewed the lease.
    """

    token: str
    since: str
    beat: int = 0

    @classmethod
    def current(cls) -> "Owner":
        """Describe the calling process, under a new token."""
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        process = dataclasses.asdict(Process.current())
        return cls(**process, token=secrets.token_hex(16), since=since)

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Return the owner that `to_json` wrote; an unknown owner if it is damaged."""
        try:
            owner = cls(**json.loads(content))
            if not (_is_pid(owner.pid) and isinstance(owner.beat, int)):
                raise ValueError(owner)
            return owner
        except (ValueError, TypeError, RecursionError):
            return cls(_UNKNOWN, None, 0, None, token=_UNKNOWN, since=_UNKNOWN)

    def to_json(self) -> bytes:
        """Return the owner as readable JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2).encode() + b"\n"

    def __str__(self) -> str:
        if self.token == _UNKNOWN:
            return "an unknown process (its lease is damaged)"
        return f"process {self.pid} on host {self.host} since {self.since}"


def _is_pid(value: Any) -> bool:
    """Return whether a value can be the number of a process on any system."""
    return isinstance(value, int) and 0 < value < 2**31


def state_and_start(pid: int) -> tuple[str | None, int | str | None]:
    """Return a process's state letter and start time; (None, None) if hidden.

    Source: proc_pid_stat(5): fields 3 and 22, in ticks since the boot.
    """
    if not _PROC.exists():  # macOS
        command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
        line = subprocess.run(command, capture_output=True, text=True).stdout
        state, _, start = line.strip().partition(" ")
        return (state[0], start.strip()) if start else (None, None)
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None, None
    # The process name, in parentheses, may contain any character.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _machine() -> str | None:
    if not _PROC.exists():
        return f"{uuid.getnode():x}"
    try:
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return None
