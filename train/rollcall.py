"""The roll of a run's processes, called before JAX connects them.

Process 0 listens where JAX's coordinator will listen right after, so no second port
is needed. Each process says its number; when all are there, or too late, all are told.
"""

import json
import logging
import socket
import time
from collections.abc import Iterable

from train.exits import ABORTED, WRONG_CONFIG, Exit

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_REMIND_S = 30.0
_TAKEN_S = 10.0  # that an earlier start, about to end, may hold the port
_HELLO_S = 5.0  # for one who has connected to say who it is


def call(address: str, process: int, processes: int, timeout_s: float) -> None:
    """Wait for all others, as process 0, and let them go on.

    Raises:
        Exit: not all came in time, or two came as one; they are named.
    """
    arrived: dict[int, tuple[socket.socket, str]] = {}
    missing = set(range(1, processes))
    deadline, remind = time.monotonic() + timeout_s, time.monotonic() + _REMIND_S
    with _listen(address, processes) as server:
        while missing:
            now = time.monotonic()
            if now > deadline:
                wrong = f"no sign of {numbered(missing)} of {processes} within "
                wrong += f"distributed.init_timeout_s={timeout_s:.0f}"
                _end(arrived, ABORTED, wrong)
            if now > remind:
                log.warning("waiting for %s of %d", numbered(missing), processes)
                remind = now + _REMIND_S
            server.settimeout(min(deadline, remind) - now + 0.01)
            try:
                connection, (host, *_) = server.accept()
                connection.settimeout(_HELLO_S)
                hello = json.loads(connection.makefile().readline())
                who, total = hello["process"], hello["processes"]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # nobody came; or a stranger, who is none of ours
            if total != processes or who not in missing:
                other = arrived[who][1] if who in arrived else "process 0's"
                wrong = f"process {who} of {total} came from {host}, but "
                wrong += (
                    f"there are {processes} processes"
                    if total != processes
                    else f"there is one of that number already, on {other}"
                )
                arrived[-1] = connection, host
                _end(arrived, WRONG_CONFIG, wrong)
            arrived[who] = connection, host
            missing.discard(who)
    _reply(arrived, {})


def answer(address: str, process: int, processes: int, timeout_s: float) -> None:
    """Report to process 0, and wait for the others.

    Raises:
        Exit: process 0 cannot be reached, or tells who is missing.
    """
    deadline = time.monotonic() + timeout_s
    hello = json.dumps({"process": process, "processes": processes}) + "\n"
    host, _, port = address.rpartition(":")
    while True:
        left_s = deadline - time.monotonic()
        try:
            with socket.create_connection((host.strip("[]"), int(port)), 5) as server:
                server.sendall(hello.encode())
                server.settimeout(max(1.0, left_s + _HELLO_S))
                reply = json.loads(server.makefile().readline())
                break
        except (OSError, ValueError) as error:
            if left_s < 0:
                raise Exit(
                    ABORTED,
                    f"process {process}: process 0 could not be reached at {address} "
                    f"within distributed.init_timeout_s={timeout_s:.0f} ({error})",
                ) from None
            time.sleep(_RETRY_S)
    if "code" in reply:
        raise Exit(reply["code"], f"process {process}: {reply['wrong']}")


def numbered(processes: Iterable[int]) -> str:
    """Name processes: `process 3`, `processes 3, 5, 6`, the first ten of many."""
    who = sorted(processes)
    more = f" and {len(who) - 10} more" if len(who) > 10 else ""
    return f"process{'es' * (len(who) > 1)} {', '.join(map(str, who[:10]))}{more}"


def _listen(address: str, processes: int) -> socket.socket:
    port = int(address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    deadline = time.monotonic() + _TAKEN_S
    while True:
        try:
            return socket.create_server(
                ("", port), family=family, backlog=processes, dualstack_ipv6=both
            )
        except OSError as error:
            if time.monotonic() > deadline:
                raise Exit(
                    ABORTED,
                    f"port {port} of process 0 is taken ({error.strerror}): another "
                    f"run on this host? Give distributed.coordinator_address, or "
                    f"JAX_COORDINATOR_PORT, another port",
                ) from None
        time.sleep(_RETRY_S)


def _reply(arrived: dict[int, tuple[socket.socket, str]], reply: dict) -> None:
    for connection, _ in arrived.values():
        with connection:
            try:
                connection.sendall(json.dumps(reply).encode() + b"\n")
            except OSError:
                log.warning("a process left while the others were waited for")


def _end(arrived: dict[int, tuple[socket.socket, str]], code: int, wrong: str) -> None:
    _reply(arrived, {"code": code, "wrong": wrong})
    raise Exit(code, wrong)
