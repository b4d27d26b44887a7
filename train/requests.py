"""Requests that all processes act on together: to stop, to save.

A preemption notice (SIGTERM, or a scheduler's SIGUSR1 or SIGUSR2) or Ctrl-C may reach
any one process, at any time. While there is no step to save, all leave at once. Else
all stop after the same step, the first that none of them has passed: each tells how far
it is, process 0 takes the maximum, and nobody passes a step until that is known. This
runs in threads beside the training, so it needs no device, and works also while the
main thread compiles. A save whose time has come is agreed on in the same way.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import jax

from train.cluster import Cluster
from train.exits import PREEMPTED, STOPPED, Exit

log = logging.getLogger(__name__)

SAVE, _END = "save", "end"
_SIGNALS = {
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
    signal.SIGUSR2: PREEMPTED,
    signal.SIGINT: STOPPED,
}
_BEFORE, _AFTER = -1, 2**62  # the steps; where there is nothing to save
_LEAVE = -2
_PATIENCE_S = 10.0  # for the others, when all leave


class Crash(NamedTuple):
    """What ended a process that was not asked to stop."""

    process: int
    code: int
    step: int  # that was being taken: completed updates
    error: str  # in a line


class Requests:
    """What was asked for, and after which step it is due."""

    def __init__(self) -> None:
        """Take over the signals; until `connect` this process acts for itself."""
        # Called with the exit code, in another thread, before this process leaves in
        # the midst of something.
        self.last_words: Callable[[int], None] = lambda code: None
        # On process 0: takes what ended one of them, gives the exit code of all.
        self.judge: Callable[[Crash], int] = lambda crash: crash.code
        self._cluster = Cluster()
        self._passed, self._round = _BEFORE, 0
        self._due: dict[int, str] = {}
        self._stop: int | None = None  # the code, once agreed on
        self._heard: int | None = None  # ... once this process was told to
        self._told = threading.Condition()
        self._listener: threading.Thread | None = None
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        # Python's own handlers wait for the main thread, which may be compiling.
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._wakeup = writing  # kept open
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._hear, args=(reading,), daemon=True).start()

    def connect(self, cluster: Cluster) -> None:
        """Act with the other processes from now on."""
        self._cluster = cluster
        if cluster.processes > 1:
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()

    def close(self) -> None:
        """Listen no more; all processes come here, or none (`crashed`)."""
        if self._listener:
            # A thread that waits in C++ would abort the interpreter at its end.
            self._cluster.set(f"request/{self._round}", _END)
            self._listener.join(_PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def passed(self, step: int) -> str | int | None:
        """Say that a step is done; give what is due right after it.

        Returns:
            An exit code, SAVE, or None.
        """
        with self._told:
            self._passed = step
            request = self._due.pop(step, None)
        return int(request) if request and request != SAVE else request

    @property
    def step(self) -> int:
        """The last step that was said to be done; -1 before the first."""
        return self._passed

    def finished(self) -> None:
        """Say that the last step is done and saved; leaves if that was asked for."""
        with self._told:
            self._passed = _AFTER
        if self._stop is not None:
            self._leave(self._stop)

    def ask(self, request: str) -> None:
        """Ask all processes, from any one and from any thread.

        Args:
            request: SAVE, or an exit code.
        """
        if self._cluster.processes == 1:
            with self._told:
                self._note(request, _agree([self._passed]))
            return
        while not self._cluster.set(f"request/{self._round}", request):
            current = self._round
            if request == SAVE or self._cluster.get(f"request/{current}") == request:
                return  # it is being settled already; a save is asked for again
            with self._told:
                self._told.wait_for(lambda n=current: self._round > n, _PATIENCE_S)

    def crashed(self, crash: Crash) -> None:
        """End all processes because of what happened on this one. Does not return."""
        if self._cluster.processes == 1:
            self._leave(self.judge(crash))
        self.ask(json.dumps(crash._asdict()))
        threading.Event().wait(3 * self._cluster.timeout_s)  # the listener ends us
        os._exit(crash.code)

    def _hear(self, signals: socket.socket) -> None:
        """Turn signals into requests."""
        while received := signals.recv(1):
            code = _SIGNALS.get(signal.Signals(received[0]))
            if code == STOPPED and self._heard == STOPPED:
                os._exit(STOPPED)  # Ctrl-C again: at once
            if code is not None and self._heard is None:
                self._heard = code
                name = signal.Signals(received[0]).name
                log.warning("%s: asked to stop", name)
                self.ask(str(code))

    def _listen(self) -> None:
        """Settle the requests of all processes, one after the other."""
        cluster = self._cluster
        while True:
            key = f"request/{self._round}"
            try:
                request = cluster.get(key)
            except jax.errors.JaxRuntimeError:
                return  # the end of the program, or of process 0: JAX sees to it
            if request == _END:
                return
            with self._told:
                if request.startswith("{"):
                    self._end_with(Crash(**json.loads(request)), key)
                where = cluster.gather(f"{key}/passed", str(self._passed))
                if cluster.first:
                    cluster.set(f"{key}/step", str(_agree([int(w) for w in where])))
                self._note(request, int(cluster.get(f"{key}/step", cluster.timeout_s)))
                self._round += 1
                self._told.notify_all()

    def _end_with(self, crash: Crash, key: str) -> None:
        """Leave with the code that a crash means, once all are there to hear it.

        A lost process makes the others crash: that is no fault of the step's. JAX,
        which misses its heartbeats, aborts them while they wait here.
        """
        cluster = self._cluster
        try:
            cluster.gather(f"{key}/here", "")
        except Exit as lost:
            log.error("%s", lost)
            crash = crash._replace(code=lost.code)
        if cluster.first:
            cluster.set(f"{key}/code", str(self.judge(crash)))
        self._leave(int(cluster.get(f"{key}/code", 2 * cluster.timeout_s)))

    def _note(self, request: str, step: int) -> None:
        if request == SAVE:
            self._due.setdefault(step, request)
            return
        self._stop = int(request)
        if step == _LEAVE or self._passed == _AFTER:
            self._leave(self._stop)
        self._due[step] = request

    def _leave(self, code: int) -> None:
        """End this process from any thread, once the others are about to."""
        self._cluster.wait("leave", _PATIENCE_S)
        try:
            self.last_words(code)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            if self._cluster.processes > 1 and self._cluster.first:
                time.sleep(0.5)  # JAX aborts the others when process 0 is gone
            os._exit(code)


def _agree(passed: list[int]) -> int:
    """Give the step after which a request is due, or _LEAVE.

    Some may be through with the last step while others are about to be: these will
    meet the request when they have saved it (`finished`).
    """
    if _BEFORE in passed or min(passed) == _AFTER:
        return _LEAVE
    return max(step for step in passed if step != _AFTER) + 1
