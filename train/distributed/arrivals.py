"""Receive the processes of a run at the port of process 0, and turn others away.

Any program on the network may connect. Only a process that knows the job's secret
(`messages.py`) can end the rendezvous. Another client may send `MAX_HELLO_BYTES`, has
`CLIENT_S` seconds, and is turned away if too many clients have not said who they are.
It is named in the log.
"""

import contextlib
import logging
import selectors
import socket
import time
from typing import NamedTuple

from train.distributed.messages import (
    MAX_HELLO_BYTES,
    Hello,
    NotOurs,
    OtherRun,
    heard_line,
    parse_hello,
    refusal_line,
)
from train.errors import ABORTED, WRONG_CONFIG, Exit

log = logging.getLogger(__name__)

CLIENT_S = 10.0  # how long a client may take for its first message
# Connections that have not said who they are, besides one for each missing process.
MAX_UNKNOWN = 256
_MAX_NAMED = 20  # clients that the log names


class _Client(NamedTuple):
    """A connection that has not said who it is."""

    host: str
    deadline: float
    received: bytearray


class Arrivals:
    """The connections of a rendezvous, at a socket that listens.

    arrived: connection and host of each process that has arrived, by its number.
    turned_away: descriptions of clients that are no processes of the run.
    """

    def __init__(self, server: socket.socket, processes: int, secret: str):
        self.arrived: dict[int, tuple[socket.socket, str]] = {}
        self.turned_away: list[str] = []
        self._server = server
        self._processes = processes
        self._secret = secret
        self._unknown: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)  # a client may be gone before it is accepted
        self._selector.register(server, selectors.EVENT_READ)

    def missing(self) -> set[int]:
        """Return the numbers of the processes that have not arrived."""
        return {*range(1, self._processes)} - self.arrived.keys()

    def receive(self, until: float) -> None:
        """Wait for messages until a monotonic time, or shorter, and handle them.

        Raises:
            Exit: a process of this run sends a wrong number or count, or has left.
        """
        now = time.monotonic()
        for connection, client in [*self._unknown.items()]:
            if client.deadline < now:
                reason = f"has not said within {CLIENT_S:.0f} s which process it is"
                self._turn_away(connection, reason)
        wake_at = min([until, *(c.deadline for c in self._unknown.values())])
        for key, _ in self._selector.select(max(0.0, wake_at - now) + 0.01):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._server:
                self._accept()
            elif connection in self._unknown:
                self._receive_hello(connection)
            elif connection.fileno() >= 0:  # not closed since `select`
                self._check_still_there(connection)

    def close(self) -> None:
        """Close the connections of clients that are not known."""
        self._selector.close()
        for connection in self._unknown:
            connection.close()

    def _accept(self) -> None:
        try:
            connection, (host, *_) = self._server.accept()
        except OSError:  # the client is gone again
            return
        if len(self._unknown) >= MAX_UNKNOWN + len(self.missing()):
            oldest = next(iter(self._unknown))
            self._turn_away(oldest, "is one of too many that say nothing")
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        deadline = time.monotonic() + CLIENT_S
        self._unknown[connection] = _Client(host, deadline, bytearray())

    def _turn_away(self, connection: socket.socket, reason: str) -> None:
        """Close the connection of a client that is no process of the run."""
        host = self._unknown.pop(connection).host
        self._selector.unregister(connection)
        connection.close()
        description = f"a client on {host} {reason}"
        is_new = description not in self.turned_away
        if is_new and len(self.turned_away) < _MAX_NAMED:
            log.warning("%s: it is no process of this run", description)
            self.turned_away.append(description)

    def _receive_hello(self, connection: socket.socket) -> None:
        """Register a process that says who it is; turn any other client away."""
        client = self._unknown[connection]
        data = b""
        with contextlib.suppress(OSError):
            data = connection.recv(MAX_HELLO_BYTES + 1 - len(client.received))
        client.received.extend(data)
        is_too_long = len(client.received) > MAX_HELLO_BYTES
        if data and not is_too_long and b"\n" not in client.received:
            return  # the rest of the message may still come
        try:
            hello = parse_hello(bytes(client.received), self._secret)
        except NotOurs as error:
            if isinstance(error, OtherRun):
                send(connection, refusal_line())
            self._turn_away(connection, str(error) if client.received else "is silent")
            return
        del self._unknown[connection]
        send(connection, heard_line(self._secret))
        self._register(hello, connection, client.host)

    def _register(self, hello: Hello, connection: socket.socket, host: str) -> None:
        number, total = hello
        processes = self._processes
        arrived = self.arrived
        if total != processes or not 0 < number < processes or number in arrived:
            other_host = arrived[number][1] if number in arrived else "process 0's host"
            reason = f"there is one of that number already, on {other_host}"
            if total != processes:
                reason = f"there are {processes} processes"
            message = f"process {number} of {total} came from {host}, but {reason}"
            arrived[-1] = connection, host  # This process gets the verdict, too.
            raise Exit(
                WRONG_CONFIG,
                f"{message}. Give all processes the same distributed.num_processes, "
                f"each process its own distributed.process_id, and each run its own "
                f"port",
            )
        arrived[number] = connection, host

    def _check_still_there(self, connection: socket.socket) -> None:
        """Raise Exit if a registered process has left."""
        try:
            if connection.recv(MAX_HELLO_BYTES):
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # it has left
        for number, (registered, host) in self.arrived.items():
            if registered is connection:
                message = f"process {number} on {host} left while the others were "
                raise Exit(ABORTED, f"{message}waited for")


def send(connection: socket.socket, line: bytes) -> None:
    """Send a line to a client; log a warning if it is gone."""
    try:
        connection.sendall(line)
    except OSError:
        log.warning("a process left while the others were waited for")
