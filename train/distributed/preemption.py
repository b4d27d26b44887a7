"""Preemption: requests to stop, save or trace that all processes act on together.

A preemption notice (SIGTERM, or a scheduler's SIGUSR1 or SIGUSR2) or Ctrl-C may reach
only one of the processes, at any time. If some process does not train yet, or all have
saved the last step, all exit at once. Otherwise all stop after the same step, the first
that none of them has completed: each process reports its last step, process 0 adds one
to the maximum, and no process completes a step until this answer is known. Threads
exchange these messages without a device, so that this works even while the main thread
compiles. Processes agree on saves and traces in the same way.
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

from train.core.services import SAVE
from train.distributed.processes import Cluster
from train.errors import ABORTED, PREEMPTED, STOPPED, Exit

log = logging.getLogger(__name__)

TRACE = "trace:"  # The number of steps follows.
_END = "end"
_SIGNALS = {
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
    signal.SIGUSR2: PREEMPTED,
    signal.SIGINT: STOPPED,
}
_BEFORE = -1  # in place of a step: before training
_AFTER = 2**62  # in place of a step: the last step is saved
_LEAVE = -2  # in place of the due step: exit at once
_PATIENCE_S = 10.0  # how long to wait for the others when all exit


class Crash(NamedTuple):
    """The end of a process that was not asked to stop."""

    process: int
    code: int
    step: int  # the number of completed updates
    error: str  # the error, in one line
    known: bool  # whether the error was expected and explains itself


class Preemption:
    """Collects requests, and decides with all processes when each is due."""

    def __init__(self) -> None:
        """Begin to handle signals; until `connect` this process acts alone."""
        # Called with the exit code, from any thread, before this process exits in the
        # middle of its work.
        self.before_exit: Callable[[int], None] = lambda code: None
        # On process 0: turns the crash of one process into the exit code of all.
        self.judge_crash: Callable[[Crash], int] = lambda crash: crash.code
        self._cluster = Cluster()
        self._passed_step = _BEFORE
        self._round = 0
        self._due: dict[int, str] = {}  # requests, by the step that they follow
        self._traces: dict[int, int] = {}  # numbers of steps to trace, likewise
        self._agreed_code: int | None = None  # set once all have agreed to stop
        self._signal_code: int | None = None  # set by the first signal
        self._held = False  # whether signals are only recorded (`hold`, `close`)
        self.leaving = False  # True: all processes exit, which may cause later errors
        self._changed = threading.Condition()
        self._listener: threading.Thread | None = None
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        # Python runs its handlers only on the main thread, which may be compiling.
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._wakeup = sender  # this reference keeps the socket open
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._read, args=(receiver,), daemon=True).start()

    def hold(self) -> None:
        """Delay signals until `connect`, because the others wait for this process."""
        with self._changed:
            self._held = True

    def connect(self, cluster: Cluster) -> None:
        """Act with the other processes from now on."""
        self._cluster = cluster
        if cluster.processes > 1:
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        with self._changed:
            self._held = False
        if self._signal_code is not None:
            self.request(str(self._signal_code))

    def close(self) -> None:
        """Stop handling requests. All processes must call this, or none (`crashed`)."""
        # While Python shuts down, it restores the default action of handled signals, so
        # a signal would end the process; ignored signals stay ignored. Ctrl-C is not
        # ignored, so that it can end a process that hangs.
        for number in _SIGNALS.keys() - {signal.SIGINT}:
            signal.signal(number, signal.SIG_IGN)
        with self._changed:
            self._held = True
        # A thread that still waits in C++ would abort the interpreter at exit.
        if self._listener:
            self.request(_END)
            self._listener.join(_PATIENCE_S)

    def step_done(self, step: int) -> str | int | None:
        """Record a completed step; return what is due: an exit code, SAVE or None."""
        with self._changed:
            self._passed_step = step
            request = self._due.pop(step, None)
        return int(request) if request and request != SAVE else request

    def steps_to_trace(self, step: int) -> int:
        """Return the agreed number of steps to trace after this step, usually 0."""
        with self._changed:
            return self._traces.pop(step, 0)

    @property
    def step(self) -> int:
        """The last completed step; -1 before training, 2**62 once the last is saved."""
        return self._passed_step

    def training_done(self) -> None:
        """Record that the last step is saved; exit if a stop was requested."""
        with self._changed:
            self._passed_step = _AFTER
        if self._agreed_code is not None:
            self._exit(self._agreed_code)

    def request(self, request: str) -> None:
        """Ask all processes to save, trace or exit; any thread may call this.

        `request` is SAVE, TRACE with the number of steps, an exit code, or a crash.
        """
        if self._cluster.processes == 1:
            with self._changed:
                self._schedule(request, _due_step([self._passed_step]))
            return
        while not self._cluster.set(f"request/{self._round}", request):
            current = self._round
            if request == SAVE or self._cluster.get(f"request/{current}") == request:
                return  # already requested, or a save that gives way to another request
            with self._changed:
                self._changed.wait_for(lambda n=current: self._round > n, _PATIENCE_S)

    def crashed(self, crash: Crash) -> None:
        """End all processes because this one crashed. Does not return."""
        if self._cluster.processes == 1:
            self._exit(self.judge_crash(crash))
        try:
            self.request(json.dumps(crash._asdict()))
        except jax.errors.JaxRuntimeError:
            log.error("process 0 is gone")
            os._exit(ABORTED)
        # The listener ends this process, or JAX does if a process was lost.
        threading.Event().wait(self._cluster.timeout_s + _PATIENCE_S)
        os._exit(ABORTED)

    def _read(self, receiver: socket.socket) -> None:
        """Turn signals into requests."""
        while received := receiver.recv(1):
            code = _SIGNALS.get(signal.Signals(received[0]))
            if code == STOPPED and self._signal_code == STOPPED:
                os._exit(STOPPED)  # a second Ctrl-C ends the process at once
            if code is not None and self._signal_code is None:
                with self._changed:
                    self._signal_code = code
                    held = self._held
                name = signal.Signals(received[0]).name
                log.warning("%s: asked to stop", name)
                if not held:
                    self.request(str(code))

    def _listen(self) -> None:
        """Handle the requests of all processes, one after the other."""
        try:
            while self._settle(f"request/{self._round}"):
                pass
        except jax.errors.JaxRuntimeError:
            return  # this process is ending, or process 0 is gone and JAX aborts
        except (Exit, TimeoutError) as error:
            log.error("the processes could not agree: %s", error)
            self._exit(ABORTED)

    def _settle(self, key: str) -> bool:
        """Wait for a request, and agree on its step; return False if it is the last."""
        cluster = self._cluster
        request = cluster.get(key)
        if request == _END:
            return False
        with self._changed:
            passed_steps = cluster.gather(f"{key}/passed", str(self._passed_step))
            if request.startswith("{"):  # a crash; process 0 has heard from all
                if cluster.is_leader:
                    code = self.judge_crash(Crash(**json.loads(request)))
                    cluster.set(f"{key}/code", str(code))
                self._exit(int(cluster.get(f"{key}/code", 2 * cluster.timeout_s)))
            if cluster.is_leader:
                due = _due_step([int(passed) for passed in passed_steps])
                cluster.set(f"{key}/step", str(due))
            # Twice, because process 0 may itself wait `timeout_s` for the others.
            step = cluster.get(f"{key}/step", 2 * cluster.timeout_s)
            self._schedule(request, int(step))
            self._round += 1
            self._changed.notify_all()
        return True

    def _schedule(self, request: str, step: int) -> None:
        # A trace requested before training is lost; run/profiles.py requests it again.
        if request.startswith(TRACE):
            self._traces[step] = int(request.removeprefix(TRACE))
            return
        if request == SAVE:
            self._due.setdefault(step, request)
            return
        self._agreed_code = int(request)
        if step == _LEAVE or self._passed_step == _AFTER:
            self._exit(self._agreed_code)
        self._due[step] = request

    def _exit(self, code: int) -> None:
        """End this process from any thread; wait briefly until the others are ready."""
        self.leaving = True
        self._cluster.wait("leave", _PATIENCE_S)
        try:
            self.before_exit(code)
        finally:
            try:
                sys.stdout.flush()  # raises if the pipe is broken
                sys.stderr.flush()
            finally:
                if self._cluster.processes > 1 and self._cluster.is_leader:
                    time.sleep(0.5)  # JAX aborts the others when process 0 is gone
                os._exit(code)


def _due_step(passed_steps: list[int]) -> int:
    """Return the step after which a request is due, or _LEAVE.

    If the due step is beyond the last one, processes that have saved the last step exit
    at once, and the others exit when they have saved it (`training_done`).
    """
    if _BEFORE in passed_steps or min(passed_steps) == _AFTER:
        return _LEAVE
    return max(step for step in passed_steps if step != _AFTER) + 1
