"""The rendezvous of a run's processes, before JAX connects them.

Process 0 listens on the port that JAX's coordinator takes afterwards, so no second port
is needed. Each process sends its number, and gets an answer. When all have arrived,
when the time is up, or when a process leaves, process 0 informs all.

Only processes that know the job's secret are processes of the run (`messages.py`). Any
other client can neither delay nor end the run (`arrivals.py`).
"""

import logging
import resource
import socket
import time

from train.distributed.arrivals import Arrivals, send
from train.distributed.messages import (
    MAX_ANSWER_BYTES,
    Hello,
    NotOurs,
    Verdict,
    check_heard,
    hello_line,
    parse_verdict,
    verdict_line,
)
from train.errors import ABORTED, WRONG_CONFIG, Exit
from train.units import process_names

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_REMIND_S = 30.0
# How long to retry the port, which an earlier start may occupy until JAX's heartbeat
# timeout.
_TAKEN_S = 120.0
_GRACE_S = 5.0  # how long process 0 has to tell the others that the time is up
_ALONE_S = 5.0  # how long process 0 waits for an answer of another process 0
_OTHER_FILES = 512  # files that process 0 opens in addition to connections
_STRANGER = (
    "Something else answers there: another run, a run that has begun with another "
    "process of this number, or another program. Give each process its own "
    "distributed.process_id, and each run its own port in "
    "distributed.coordinator_address"
)


def await_processes(
    address: str, processes: int, timeout_s: float, secret: str = ""
) -> None:
    """Wait, on process 0, until all others have arrived; then tell them to continue.

    Raises:
        Exit: processes are missing, left, share a number, or expect another process
            count; the message names them.
    """
    _allow_open_files(processes + _OTHER_FILES)
    verdict = Verdict(ABORTED, "process 0 left")
    with _listen(address, processes, secret) as server:
        arrivals = Arrivals(server, processes, secret)
        try:
            _await_all(arrivals, processes, timeout_s)
            verdict = Verdict()
        except Exit as error:
            verdict = Verdict(error.code, str(error))
            raise
        finally:
            # JAX's coordinator takes the port as soon as a process goes on.
            server.close()
            arrivals.close()
            for connection, _ in arrivals.arrived.values():
                with connection:
                    send(connection, verdict_line(verdict))


def join_processes(
    address: str, process: int, processes: int, timeout_s: float, secret: str = ""
) -> None:
    """Report to process 0, and wait for the others.

    Raises:
        Exit: process 0 cannot be reached, leaves, or reports a failed rendezvous. The
            code is WRONG_CONFIG if another program answers at its address.
    """
    began = time.monotonic()
    has_warned = False
    is_acknowledged = False
    host, _, port = address.rpartition(":")
    while True:
        waited_s = time.monotonic() - began
        is_stranger = False
        try:
            with socket.create_connection((host.strip("[]"), int(port)), 5) as leader:
                leader.sendall(hello_line(Hello(process, processes), secret))
                # Process 0 waits `timeout_s` from its own start, which may be later.
                lines = _Lines(leader, time.monotonic() + timeout_s + _GRACE_S)
                check_heard(lines.read(), secret)
                is_acknowledged = True
                verdict = parse_verdict(lines.read())
                break
        except (OSError, NotOurs) as error:
            if is_acknowledged:
                reason = "process 0 left while the others were waited for"
                raise Exit(ABORTED, f"process {process}: {reason}") from None
            is_stranger = isinstance(error, NotOurs)
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
    if verdict.code is not None:
        raise Exit(verdict.code, f"process {process}: {verdict.wrong}")


class _Lines:
    """Reads lines of limited length from process 0, until a deadline."""

    def __init__(self, connection: socket.socket, deadline: float):
        self._connection = connection
        self._deadline = deadline
        self._received = b""

    def read(self) -> bytes:
        """Return the next line.

        Raises:
            NotOurs: another program answers.
            OSError: the connection was closed, or the deadline has passed.
        """
        while b"\n" not in self._received:
            if self._received[:1] not in (b"", b"{"):
                # Any other program, like the coordinator of a run that has begun, sends
                # no JSON, and it may wait for an answer before it ends a line.
                raise NotOurs("another program answers")
            if len(self._received) > MAX_ANSWER_BYTES:
                raise NotOurs("the answer has no end")
            remaining_s = self._deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError("no answer in time")
            self._connection.settimeout(remaining_s)
            data = self._connection.recv(4096)
            if not data:
                raise ConnectionError("the connection was closed")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line + b"\n"


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


def _listen(address: str, processes: int, secret: str) -> socket.socket:
    """Return a socket on the port of process 0, after a wait if the port is taken.

    Raises:
        Exit: the port stays taken, or another process 0 of this job answers there.
    """
    port = int(address.rpartition(":")[2])
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    deadline = time.monotonic() + _TAKEN_S
    while True:
        _check_alone(address, processes, secret)
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


def _check_alone(address: str, processes: int, secret: str) -> None:
    """Raise Exit if another process 0 of this job waits at the address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ALONE_S) as other:
            other.sendall(hello_line(Hello(0, processes), secret))
            lines = _Lines(other, time.monotonic() + _ALONE_S)
            check_heard(lines.read(), secret)
            verdict = parse_verdict(lines.read())
    except (OSError, NotOurs):
        return
    raise Exit(WRONG_CONFIG, f"process 0: {verdict.wrong}")


def _await_all(arrivals: Arrivals, processes: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    remind_at = time.monotonic() + _REMIND_S
    while missing := arrivals.missing():
        now = time.monotonic()
        if now > deadline:
            message = f"no sign of {process_names(missing)} of {processes} within "
            message += f"distributed.init_timeout_s={timeout_s:.0f}"
            if arrivals.turned_away:
                clients = "; ".join(arrivals.turned_away)
                message += f". Clients that were turned away: {clients}"
            raise Exit(ABORTED, message)
        if now > remind_at:
            log.warning("waiting for %s of %d", process_names(missing), processes)
            remind_at = now + _REMIND_S
        arrivals.receive(until=min(deadline, remind_at))
