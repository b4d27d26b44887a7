"""Who a process is, so that another can say whether it still lives."""

import dataclasses
import datetime
import json
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

_UNKNOWN = "unknown"
_PROC = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """A process that owns, or owned, a run.

    token: of this lease alone; nobody else writes it.
    machine: the boot and the process namespace in which pid and start mean something;
        None where there is no /proc.
    start: of the process, in ticks since the boot.
    since: for people; never compared.
    beat: how many times it said that it lives.
    """

    token: str
    host: str
    machine: str | None
    pid: int
    start: int | None
    since: str
    beat: int = 0

    @classmethod
    def this_process(cls) -> "Owner":
        """Describe this process, under a new token."""
        pid = os.getpid()
        _, start = _state_and_start(pid)
        now = datetime.datetime.now(datetime.UTC)
        return cls(
            token=secrets.token_hex(16),
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            start=start,
            since=now.isoformat(timespec="seconds"),
        )

    @classmethod
    def from_json(cls, content: bytes) -> "Owner":
        """Read what `to_json` wrote; of an owner in anything else nothing is known."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return cls(_UNKNOWN, _UNKNOWN, None, 0, None, _UNKNOWN)

    def to_json(self) -> bytes:
        """Write it down, for people to read too."""
        return json.dumps(dataclasses.asdict(self), indent=2).encode() + b"\n"

    def __str__(self) -> str:
        """Name it."""
        if self.token == _UNKNOWN:
            return "a process that cannot be told from the damaged lease"
        return f"process {self.pid} on host {self.host} since {self.since}"

    def alive(self) -> bool | None:
        """Say whether it lives; None if that cannot be known from here.

        A stopped process lives, one that has ended and was not waited for does not.
        """
        if self.machine is None or self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)  # /proc may hide other people's processes
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        state, start = _state_and_start(self.pid)
        if start is None or self.start is None:
            return None
        return start == self.start and state not in ("Z", "X")


def _machine() -> str | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return None


def _state_and_start(pid: int) -> tuple[str | None, int | None]:
    """Read a process' state and its start, if they are to be had."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None, None
    # Source: proc_pid_stat(5). The name, in brackets, may hold anything.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])
