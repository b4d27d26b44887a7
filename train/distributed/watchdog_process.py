"""The watchdog process, which ends a trainer that makes no progress.

    python watchdog_process.py PID MEMORY PROCESS PROCESSES FOLDER

It imports only the standard library until there is something to write, and shares only
a piece of memory with the trainer. Whatever blocks the trainer (the lock of the
interpreter, a full pipe, dead storage) blocks the watchdog for at most `_PATIENCE_S`.
It ends when the trainer ends, in whatever way.
"""

import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

# The first page of the memory; the stacks that `faulthandler` writes follow it.
LAYOUT = struct.Struct("=qqqd")  # beats, phase, step, seconds allowed
# Ordered as in a run: of two processes at one step, the one in an earlier phase is
# late.
PHASES = ("init", "restore", "compile", "log", "eval", "save", "data", "step")
DUMP = signal.SIGVTALRM  # asks for the stacks; nothing else uses this signal

_TICK_S = 0.25
_PATIENCE_S = 30.0  # the longest wait for storage or for a reader of our messages
_OTHERS_S = 2.0  # until the other processes have seen it too
_ABORT_S = 5.0
_NAMED = 8  # processes in a message


class WatchedTrainer(NamedTuple):
    """The process to watch."""

    pid: int  # our parent
    memory: int  # an open file
    process: int
    processes: int
    folder: str  # the folder of stacks and reports


class Stall(NamedTuple):
    """The phase and step of a process that exceeded its deadline."""

    process: int
    host: str
    phase: str
    step: int
    seconds: float  # since its last sign of life
    allowed: float

    def __str__(self) -> str:
        place = f"process {self.process} on host {self.host}"
        phase = f'phase "{self.phase}" (step {self.step})'
        times = f"{self.seconds:.0f} s, allowed {self.allowed:g} s"
        return f"{place}: no progress in {phase} for {times}"


def main(trainer: WatchedTrainer) -> None:
    """Watch a trainer until it is gone, or end it."""
    began = time.monotonic()
    # A scheduler may signal every process; what to do is the trainer's affair.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    stall = watch(trainer)
    if stall:
        _send(trainer, signal.SIGCONT, DUMP)
        _say(trainer, str(stall), lambda: report(trainer, stall, began))
        end(trainer)
    elif _stacks(trainer):
        about = f"process {trainer.process} was aborted"
        _say(trainer, about, lambda: f". Stacks: {_keep_stacks(trainer)}")


def watch(trainer: WatchedTrainer) -> Stall | None:
    """Wait until the trainer is gone (None), or its time is up."""
    page = mmap.mmap(trainer.memory, mmap.PAGESIZE, prot=mmap.PROT_READ)
    last_beat, silent, last = None, 0.0, time.monotonic()
    while os.getppid() == trainer.pid:
        # A longer tick means that this process was stopped: with it, the machine.
        now = time.monotonic()
        silent, last = silent + min(now - last, 1.0), now
        # A half-written beat is a sign of life too.
        _, phase, step, allowed = beat = LAYOUT.unpack_from(page)
        if beat != last_beat:
            last_beat, silent = beat, 0.0
        elif silent > allowed:
            return Stall(
                process=trainer.process,
                host=socket.gethostname(),
                phase=PHASES[phase],
                step=step,
                seconds=silent,
                allowed=allowed,
            )
        time.sleep(_TICK_S)
    return None


def report(trainer: WatchedTrainer, stall: Stall, began: float) -> str:
    """Write stall and stacks to the folder, and return who is behind."""
    files = _open(trainer.folder)
    mine = f"{trainer.folder}/process{stall.process}.json"
    files.pipe_file(mine, json.dumps(stall._asdict()).encode())
    age = time.monotonic() - began
    time.sleep(_OTHERS_S)
    stacks = _keep_stacks(trainer)
    if trainer.processes == 1:
        return f". Stacks: {stacks}"
    # Older ones are of earlier starts; the storage's clock is the same for all hosts.
    since = files.modified(mine).timestamp() - age

    def read(path: str) -> bytes:
        fresh = path.endswith(".json") and files.modified(path).timestamp() >= since
        return files.cat_file(path) if fresh else b""

    with ThreadPoolExecutor(32) as threads:
        reports = threads.map(read, files.ls(trainer.folder, detail=False))
    stalls = [Stall(**json.loads(text)) for text in reports if text]
    return f"; behind: {behind(stalls, trainer.processes)}. Stacks: {stacks}"


def behind(stalls: list[Stall], processes: int) -> str:
    """Return the names of the processes that the others wait for."""
    places = {stall: (stall.step, PHASES.index(stall.phase)) for stall in stalls}
    first = min(places.values())
    last = [
        f"process {s.process} on host {s.host} (phase {s.phase}, step {s.step})"
        for s in sorted(stalls)
        if places[s] == first
    ]
    silent = sorted({*range(processes)} - {stall.process for stall in stalls})
    names = _few(last) if len(last) < len(stalls) else "none, all heard of are here"
    return names + (f"; not heard of: process {_few(silent)}" if silent else "")


def end(trainer: WatchedTrainer) -> None:
    """Abort it, or kill it if that does not help."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        _send(trainer, number, signal.SIGCONT)
        deadline = time.monotonic() + _ABORT_S
        while os.getppid() == trainer.pid and time.monotonic() < deadline:
            time.sleep(_TICK_S)


def _send(trainer: WatchedTrainer, *numbers: int) -> None:
    for number in numbers:
        if os.getppid() == trainer.pid:  # otherwise another process may have the number
            os.kill(trainer.pid, number)


def _say(trainer: WatchedTrainer, message: str, more: Callable[[], str]) -> None:
    """Print a message and what `more` adds; if that fails or hangs, the stacks."""
    threads = ThreadPoolExecutor()
    try:
        message += threads.submit(more).result(_PATIENCE_S)
    except Exception as error:  # whatever a storage raises
        stacks = _stacks(trainer).decode()
        message += f". {trainer.folder} does not answer: {error!r}. Stacks:\n{stacks}"
    line = f"\nwatchdog: {message}\n".encode()
    with contextlib.suppress(Exception):
        threads.submit(os.write, sys.stderr.fileno(), line).result(_PATIENCE_S)


def _keep_stacks(trainer: WatchedTrainer) -> str:
    """Write the stacks to a file of their own, and give its place."""
    stacks = _stacks(trainer)
    if not stacks:
        return "none, the process did not react"
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = f"{trainer.folder}/{now}-process{trainer.process}.txt"
    _open(trainer.folder).pipe_file(path, stacks)
    return path


def _open(folder: str) -> Any:
    """Make a folder, on a disk or far away, and give its file system."""
    from fsspec.core import url_to_fs

    files, path = url_to_fs(folder)
    files.makedirs(path, exist_ok=True)
    return files


def _stacks(trainer: WatchedTrainer) -> bytes:
    """Return what the trainer's `faulthandler` has written."""
    size = os.fstat(trainer.memory).st_size
    return os.pread(trainer.memory, size, mmap.PAGESIZE)


def _few(names: Sequence[object]) -> str:
    num_omitted = len(names) - _NAMED
    text = ", ".join(map(str, names[:_NAMED]))
    return f"{text} and {num_omitted} more" if num_omitted > 0 else text


if __name__ == "__main__":
    pid, memory, process, processes = map(int, sys.argv[1:5])
    main(WatchedTrainer(pid, memory, process, processes, sys.argv[5]))
    os._exit(0)  # whatever may still hang
