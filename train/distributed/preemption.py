"""Preemption: requests to stop, save or trace that all processes act on together.

A preemption notice (SIGTERM, or a scheduler's SIGUSR1 or SIGUSR2) or Ctrl-C may reach
any one process, at any time. While there is no step to save, all leave at once.
Otherwise all stop after the same step, the first that none of them has passed: each
process reports its step, process 0 takes the maximum, and no process passes a step
until the answer is known. This runs in threads of its own, so it needs no device, and
works also while the main thread compiles. A save that is due is agreed on in the same
way.
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
from typing import NamedTuple

import jax

from train.distributed.processes import Cluster
from train.errors import ABORTED, PREEMPTED, STOPPED, Exit

log = logging.getLogger(__name__)

SAVE, TRACE, _END = "save", "trace:", "end"  # a trace with its number of steps
_SIGNALS = {
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
    signal.SIGUSR2: PREEMPTED,
    signal.SIGINT: STOPPED,
}
_BEFORE, _AFTER = -1, 2**62  # the steps; where there is nothing to save
_LEAVE = -2
_PATIENCE_S = 10.0  # how long to wait for the others when all leave


class Crash(NamedTuple):
    """The end of a process that was not asked to stop."""

    process: int
    code: int
    step: int  # the number of completed updates
    error: str  # the error, in one line
    known: bool  # an error with a message for people


class Preemption:
    """The requests that were made, and after which step each is due."""

    def __init__(self) -> None:
        """Take over the signals; until `connect` this process acts for itself."""
        # Called with the exit code, in another thread, before this process leaves in
        # the midst of something.
        self.before_exit: Callable[[int], None] = lambda code: None
        # On process 0: turns the crash of one process into the exit code of all.
        self.judge_crash: Callable[[Crash], int] = lambda crash: crash.code
        self._cluster = Cluster()
        self._passed, self._round = _BEFORE, 0
        self._due: dict[int, str] = {}
        self._traces: dict[int, int] = {}  # after a step: how many more to trace
        self._stop: int | None = None  # the code, once agreed on
        self._heard: int | None = None  # ... once this process was told to
        self._held = False  # signals are: until `connect`, and from `close` on
        self.leaving = False  # all are: what fails from now on fails because of that
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

    def hold(self) -> None:
        """Keep requests until `connect`: the others count on this process."""
        with self._told:
            self._held = True

    def connect(self, cluster: Cluster) -> None:
        """Act with the other processes from now on."""
        self._cluster = cluster
        if cluster.processes > 1:
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        with self._told:
            self._held = False
        if self._heard is not None:
            self.request(str(self._heard))

    def close(self) -> None:
        """Listen no more; all processes come here, or none (`crashed`)."""
        # Python restores the default action of a signal that it handles long before the
        # process is gone, but leaves one that is ignored. Ctrl-C may end what hangs.
        for number in _SIGNALS.keys() - {signal.SIGINT}:
            signal.signal(number, signal.SIG_IGN)
        with self._told:
            self._held = True
        # A thread that waits in C++ would abort the interpreter at its end.
        if self._listener:
            self.request(_END)
            self._listener.join(_PATIENCE_S)

    def step_done(self, step: int) -> str | int | None:
        """Note that a step is done; return what is due: an exit code, SAVE or None."""
        with self._told:
            self._passed = step
            request = self._due.pop(step, None)
        return int(request) if request and request != SAVE else request

    def steps_to_trace(self, step: int) -> int:
        """Return how many steps all agreed to trace after this one; mostly none."""
        with self._told:
            return self._traces.pop(step, 0)

    @property
    def step(self) -> int:
        """The last step that was done; -1 before the first."""
        return self._passed

    def training_done(self) -> None:
        """Note that the last step is saved; leaves if a stop was requested."""
        with self._told:
            self._passed = _AFTER
        if self._stop is not None:
            self._leave(self._stop)

    def request(self, request: str) -> None:
        """Request SAVE, TRACE or an exit code of all, from any process and thread."""
        if self._cluster.processes == 1:
            with self._told:
                self._note(request, _due_step([self._passed]))
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
            self._leave(self.judge_crash(crash))
        try:
            self.request(json.dumps(crash._asdict()))
        except jax.errors.JaxRuntimeError:
            log.error("process 0 is gone")
            os._exit(ABORTED)
        # The listening thread ends us; JAX does, if what happened is a lost process.
        threading.Event().wait(self._cluster.timeout_s + _PATIENCE_S)
        os._exit(ABORTED)

    def _hear(self, signals: socket.socket) -> None:
        """Turn signals into requests."""
        while received := signals.recv(1):
            code = _SIGNALS.get(signal.Signals(received[0]))
            if code == STOPPED and self._heard == STOPPED:
                os._exit(STOPPED)  # Ctrl-C again: at once
            if code is not None and self._heard is None:
                with self._told:
                    self._heard, held = code, self._held
                name = signal.Signals(received[0]).name
                log.warning("%s: asked to stop", name)
                if not held:
                    self.request(str(code))

    def _listen(self) -> None:
        """Settle the requests of all processes, one after the other."""
        try:
            while self._settle(f"request/{self._round}"):
                pass
        except jax.errors.JaxRuntimeError:
            return  # the end of the program, or of process 0: JAX sees to it
        except (Exit, TimeoutError) as error:
            log.error("the processes could not agree: %s", error)
            self._leave(ABORTED)

    def _settle(self, key: str) -> bool:
        """Wait for a request, and agree on it; False if it is the last."""
        cluster = self._cluster
        request = cluster.get(key)
        if request == _END:
            return False
        with self._told:
            passed_steps = cluster.gather(f"{key}/passed", str(self._passed))
            if request.startswith("{"):  # a crash; and all are still here
                if cluster.is_leader:
                    code = self.judge_crash(Crash(**json.loads(request)))
                    cluster.set(f"{key}/code", str(code))
                self._leave(int(cluster.get(f"{key}/code", 2 * cluster.timeout_s)))
            if cluster.is_leader:
                due = _due_step([int(passed) for passed in passed_steps])
                cluster.set(f"{key}/step", str(due))
            # Process 0 waits as long for the others.
            step = cluster.get(f"{key}/step", 2 * cluster.timeout_s)
            self._note(request, int(step))
            self._round += 1
            self._told.notify_all()
        return True

    def _note(self, request: str, step: int) -> None:
        if request.startswith(TRACE):  # asked for again, if there is no step yet
            self._traces[step] = int(request.removeprefix(TRACE))
            return
        if request == SAVE:
            self._due.setdefault(step, request)
            return
        self._stop = int(request)
        if step == _LEAVE or self._passed == _AFTER:
            self._leave(self._stop)
        self._due[step] = request

    def _leave(self, code: int) -> None:
        """End this process from any thread, once the others are about to."""
        self.leaving = True
        self._cluster.wait("leave", _PATIENCE_S)
        try:
            self.before_exit(code)
        finally:
            try:
                sys.stdout.flush()  # to a pipe that may be broken
                sys.stderr.flush()
            finally:
                if self._cluster.processes > 1 and self._cluster.is_leader:
                    time.sleep(0.5)  # JAX aborts the others when process 0 is gone
                os._exit(code)


def _due_step(passed: list[int]) -> int:
    """Return the step after which a request is due, or _LEAVE.

    Processes that are through with the last step wait for the others there.
    """
    if _BEFORE in passed or min(passed) == _AFTER:
        return _LEAVE
    return max(step for step in passed if step != _AFTER) + 1
