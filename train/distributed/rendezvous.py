"""The rendezvous of a run's processes, before JAX connects them.

Process 0 listens on the port that JAX's coordinator takes afterwards, so no second port
is needed. Each process sends its number, and gets an answer. When all have arrived,
when the time is up, or when a process leaves, process 0 informs all. A client that
sends something else, or nothing, is not a process of the run and delays no process.
"""

import contextlib
import json
import logging
import resource
import selectors
import socket
import time
from collections.abc import Iterable, Mapping

from train.errors import ABORTED, WRONG_CONFIG, Exit
from train.units import few

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_REMIND_S = 30.0
# How long to retry the port, which an earlier start may occupy until JAX's heartbeat
# timeout.
_TAKEN_S = 120.0
_GRACE_S = 5.0  # how long process 0 has to tell the others that the time is up
_OTHER_FILES = 512  # files that process 0 opens in addition to connections
_HEARD = {"heard": True}
_STRANGER = (
    "Something else answers there: a run that has begun with another process of this "
    "number, or another program. Give each process its own distributed.process_id, and "
    "each run its own port in distributed.coordinator_address"
)

Arrivals = dict[int, tuple[socket.socket, str]]  # connection and host, by number


def await_processes(address: str, processes: int, timeout_s: float) -> None:
    """Wait, on process 0, until all others have arrived; then tell them to continue.

    Raises:
        Exit: processes are missing, left, share a number, or expect another process
            count; the message names them.
    """
    _allow_open_files(processes + _OTHER_FILES)
    arrivals: Arrivals = {}
    verdict: dict[str, object] = {"code": ABORTED, "wrong": "process 0 left"}
    try:
        with _listen(address, processes) as server:
            _await_all(server, arrivals, processes, timeout_s)
        verdict = {}
    except Exit as error:
        verdict = {"code": error.code, "wrong": str(error)}
        raise
    finally:
        for connection, _ in arrivals.values():
            with connection:
                _send(connection, verdict)


def join_processes(
    address: str, process: int, processes: int, timeout_s: float
) -> None:
    """Report to process 0, and wait for the others.

    Raises:
        Exit: process 0 cannot be reached, leaves, or reports a failed rendezvous. The
            code is WRONG_CONFIG if another program answers at its address.
    """
    began, has_warned, is_acknowledged = time.monotonic(), False, False
    hello = json.dumps({"process": process, "processes": processes}) + "\n"
    host, _, port = address.rpartition(":")
    while True:
        waited_s, is_stranger = time.monotonic() - began, False
        try:
            with socket.create_connection((host.strip("[]"), int(port)), 5) as leader:
                leader.sendall(hello.encode())
                # Process 0 waits `timeout_s` from its own start, which may be later.
                leader.settimeout(timeout_s + _GRACE_S)
                # Any other program, like the coordinator of a run that has begun, sends
                # no JSON.
                is_stranger = leader.recv(1, socket.MSG_PEEK) not in (b"", b"{")
                lines = leader.makefile()
                if is_stranger:
                    raise ValueError("another program answers")
                is_acknowledged = json.loads(lines.readline()) == _HEARD
                verdict = json.loads(lines.readline())
                break
        except (OSError, ValueError) as error:
            if is_acknowledged:
                reason = "process 0 left while the others were waited for"
                raise Exit(ABORTED, f"process {process}: {reason}") from None
            if waited_s > timeout_s:
                reason = f"process {process}: process 0 could not be reached at "
                reason += f"{address} within distributed.init_timeout_s={timeout_s:.0f}"
                if is_stranger:
                    raise Exit(WRONG_CONFIG, f"{reason}. {_STRANGER}") from None
                raise Exit(ABORTED, f"{reason} ({error})") from None
            if waited_s > _REMIND_S and not has_warned:
                log.warning("process %d: no sign of %s (%s)", process, address, error)
                has_warned = True
            time.sleep(_RETRY_S)
    if "code" in verdict:
        raise Exit(verdict["code"], f"process {process}: {verdict['wrong']}")


def process_names(processes: Iterable[int]) -> str:
    """Format numbers as `process 3` or `processes 3, 5, 6`, at most ten of them."""
    numbers = [*map(str, sorted(processes))]
    return f"process{'es' * (len(numbers) > 1)} {few(numbers, limit=10)}"


def _allow_open_files(needed: int) -> None:
    """Raise the limit on open files, often 1,024, to allow one connection a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise Exit(
            WRONG_CONFIG,
            f"process 0 needs {needed} open files, and may have {hard}: raise the hard "
            f"limit of its host (ulimit -Hn)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _listen(address: str, processes: int) -> socket.socket:
    port = int(address.rpartition(":")[2])
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    deadline = time.monotonic() + _TAKEN_S
    while True:
        try:
            return socket.create_server(
                ("", port), family=family, backlog=processes, dualstack_ipv6=dual_stack
            )
        except OSError as error:
            if time.monotonic() > deadline:
                raise Exit(
                    WRONG_CONFIG,
                    f"port {port} of process 0 is taken ({error.strerror}): another "
                    f"run uses it, or two processes have distributed.process_id=0. "
                    f"Give distributed.coordinator_address, or JAX_COORDINATOR_PORT, "
                    f"another port, and each process its own number",
                ) from None
        time.sleep(_RETRY_S)


def _await_all(
    server: socket.socket, arrivals: Arrivals, processes: int, timeout_s: float
) -> None:
    deadline, remind_at = time.monotonic() + timeout_s, time.monotonic() + _REMIND_S
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(arrivals) < processes - 1:
            now = time.monotonic()
            if now > min(deadline, remind_at):
                missing = process_names({*range(1, processes)} - arrivals.keys())
                if now > deadline:
                    message = f"no sign of {missing} of {processes} within "
                    message += f"distributed.init_timeout_s={timeout_s:.0f}"
                    raise Exit(ABORTED, message)
                log.warning("waiting for %s of %d", missing, processes)
                remind_at = now + _REMIND_S
            for key, _ in selector.select(min(deadline, remind_at) - now + 0.01):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):  # the client may be gone again
                        connection, (host, *_) = server.accept()
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ, host)
                else:
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if not _receive_hello(connection, key.data, arrivals, processes):
                        selector.unregister(connection)
                        connection.close()


def _receive_hello(
    connection: socket.socket, host: str, arrivals: Arrivals, processes: int
) -> bool:
    """Register a process that says hello; return False for any other client.

    Raises:
        Exit: the number or count that it sends is wrong, or a registered process left.
    """
    try:
        # A hello is small enough to arrive in one piece.
        hello = json.loads(connection.recv(1024))
        number, total = int(hello["process"]), int(hello["processes"])
    except (OSError, ValueError, KeyError, TypeError):
        for number, (registered, _) in arrivals.items():
            if registered is connection:
                message = f"process {number} on {host} left while the others were "
                raise Exit(ABORTED, f"{message}waited for") from None
        return False
    _send(connection, _HEARD)
    if total != processes or not 0 < number < processes or number in arrivals:
        other_host = arrivals[number][1] if number in arrivals else "process 0's host"
        reason = f"there is one of that number already, on {other_host}"
        if total != processes:
            reason = f"there are {processes} processes"
        message = f"process {number} of {total} came from {host}, but {reason}"
        arrivals[-1] = connection, host  # This process gets the verdict, too.
        raise Exit(
            WRONG_CONFIG,
            f"{message}. Give all processes the same distributed.num_processes, each "
            f"process its own distributed.process_id, and each run its own port",
        )
    arrivals[number] = connection, host
    return True


def _send(connection: socket.socket, answer: Mapping[str, object]) -> None:
    try:
        connection.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        log.warning("a process left while the others were waited for")
