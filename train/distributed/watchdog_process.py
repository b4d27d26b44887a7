"""The watchdog process, which ends a trainer that makes no progress.

    python watchdog_process.py PID MEMORY PROCESS PROCESSES FOLDER

It imports only the standard library until it must write a report, and shares only a
piece of memory with the trainer. So the trainer's GIL cannot block it, and a full pipe
or dead storage blocks it for at most `_PATIENCE_S` each. It ends when the trainer ends,
even if the trainer is killed.
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

# The content of the memory's first page; `faulthandler` writes stacks after this page.
LAYOUT = struct.Struct("=qqqd")  # beats, phase, step, seconds allowed
# Ordered as in a run: if two processes are at the same step, the one in the earlier
# phase is late.
PHASES = ("init", "restore", "compile", "log", "eval", "save", "data", "step")
DUMP = signal.SIGVTALRM  # asks for the stacks; nothing else uses this signal

_TICK_S = 0.25
_PATIENCE_S = 30.0  # the longest wait for storage or for the reader of stderr
# How long to wait for the reports of other stalled processes. The end of a trainer ends
# its peers too, so this is also their time to write their stacks.
_OTHERS_S = 6.0
_ABORT_S = 5.0  # how long the trainer may take to end after a signal
_MAX_NAMED = 8  # processes in a message


class WatchedTrainer(NamedTuple):
    """The process to watch."""

    pid: int  # the parent of this process
    memory: int  # the descriptor of the shared file
    process: int
    processes: int
    folder: str  # the folder of stacks and reports


class Stall(NamedTuple):
    """The phase and step of a process that exceeded its deadline."""

    process: int
    host: str
    phase: str
    step: int
    seconds: float  # since its last beat
    allowed: float

    def __str__(self) -> str:
        name = f"process {self.process} on host {self.host}"
        phase = f'phase "{self.phase}" (step {self.step})'
        durations = f"{self.seconds:.0f} s, allowed {self.allowed:g} s"
        return f"{name}: no progress in {phase} for {durations}"


def main(trainer: WatchedTrainer) -> None:
    """Watch a trainer until it ends, and end it if it stalls."""
    began = time.monotonic()
    # A scheduler may signal every process, but only the trainer should react.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    stall = watch(trainer)
    if stall:
        _send(trainer, signal.SIGCONT, DUMP)
        _print(trainer, str(stall), lambda: report(trainer, stall, began))
        end(trainer)
    elif _read_stacks(trainer):
        message = f"process {trainer.process} was aborted"
        _print(trainer, message, lambda: f". Stacks: {_keep_stacks(trainer)}")


def watch(trainer: WatchedTrainer) -> Stall | None:
    """Return the stall of the trainer; None if it ends without one."""
    page = mmap.mmap(trainer.memory, mmap.PAGESIZE, prot=mmap.PROT_READ)
    last_beat = None
    silent_s = 0.0
    last_tick = time.monotonic()
    while os.getppid() == trainer.pid:
        # A tick of over 1 s means that the process was suspended, say by a sleeping
        # machine. Such a tick counts as 1 s.
        now = time.monotonic()
        silent_s = silent_s + min(now - last_tick, 1.0)
        last_tick = now
        # A half-written beat is a sign of life too.
        _, phase, step, allowed = beat = LAYOUT.unpack_from(page)
        if beat != last_beat:
            last_beat = beat
            silent_s = 0.0
        elif silent_s > allowed:
            return Stall(
                process=trainer.process,
                host=socket.gethostname(),
                phase=PHASES[phase],
                step=step,
                seconds=silent_s,
                allowed=allowed,
            )
        time.sleep(_TICK_S)
    return None


def report(trainer: WatchedTrainer, stall: Stall, began: float) -> str:
    """Write the stall and the stacks, and return the late processes as text."""
    storage = _make_folder(trainer.folder)
    own_report = f"{trainer.folder}/process{stall.process}.json"
    storage.pipe_file(own_report, json.dumps(stall._asdict()).encode())
    age = time.monotonic() - began
    if trainer.processes == 1:
        return f". Stacks: {_keep_stacks(trainer)}"
    time.sleep(_OTHERS_S)
    stacks = _keep_stacks(trainer)
    # Reports from before this watchdog began belong to earlier starts. The storage
    # dates all reports, because the clocks of hosts may disagree.
    since = storage.modified(own_report).timestamp() - age

    def read(path: str) -> bytes:
        is_new = path.endswith(".json") and storage.modified(path).timestamp() >= since
        return storage.cat_file(path) if is_new else b""

    with ThreadPoolExecutor(32) as threads:
        reports = threads.map(read, storage.ls(trainer.folder, detail=False))
    stalls = [Stall(**json.loads(text)) for text in reports if text]
    return f"; behind: {behind(stalls, trainer.processes)}. Stacks: {stacks}"


def behind(stalls: list[Stall], processes: int) -> str:
    """Return the names of the processes that the others wait for."""
    positions = {stall: (stall.step, PHASES.index(stall.phase)) for stall in stalls}
    earliest = min(positions.values())
    late = [
        f"process {s.process} on host {s.host} (phase {s.phase}, step {s.step})"
        for s in sorted(stalls)
        if positions[s] == earliest
    ]
    silent = sorted({*range(processes)} - {stall.process for stall in stalls})
    names = _join(late) if len(late) < len(stalls) else "none, all heard of are here"
    return names + (f"; not heard of: process {_join(silent)}" if silent else "")


def end(trainer: WatchedTrainer) -> None:
    """Abort the trainer, or kill it if it does not end."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        _send(trainer, number, signal.SIGCONT)
        deadline = time.monotonic() + _ABORT_S
        while os.getppid() == trainer.pid and time.monotonic() < deadline:
            time.sleep(_TICK_S)


def _send(trainer: WatchedTrainer, *numbers: int) -> None:
    for number in numbers:
        if os.getppid() == trainer.pid:  # otherwise the pid may be another process's
            os.kill(trainer.pid, number)


def _print(trainer: WatchedTrainer, message: str, details: Callable[[], str]) -> None:
    """Print a message and its details, or the stacks if `details` fails or hangs."""
    threads = ThreadPoolExecutor()
    try:
        message += threads.submit(details).result(_PATIENCE_S)
    except Exception as error:  # each storage raises its own errors
        stacks = _wait_for_stacks(trainer).decode()
        message += f". {trainer.folder} does not answer: {error!r}. Stacks:\n{stacks}"
    line = f"\nwatchdog: {message}\n".encode()
    with contextlib.suppress(Exception):
        threads.submit(os.write, sys.stderr.fileno(), line).result(_PATIENCE_S)


def _keep_stacks(trainer: WatchedTrainer) -> str:
    """Write the stacks to a new file, and return its path."""
    stacks = _wait_for_stacks(trainer)
    if not stacks:
        return "none, the process did not react"
    timestamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = f"{trainer.folder}/{timestamp}-process{trainer.process}.txt"
    _make_folder(trainer.folder).pipe_file(path, stacks)
    return path


def _make_folder(folder: str) -> Any:
    """Create a local or remote folder, and return its file system."""
    from fsspec.core import url_to_fs

    storage, path = url_to_fs(folder)
    storage.makedirs(path, exist_ok=True)
    return storage


def _wait_for_stacks(trainer: WatchedTrainer) -> bytes:
    """Return the trainer's stacks, or b"" if it does not react to `DUMP` in time."""
    deadline = time.monotonic() + _ABORT_S
    while not _read_stacks(trainer) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    return _read_stacks(trainer)


def _read_stacks(trainer: WatchedTrainer) -> bytes:
    """Return what the trainer's `faulthandler` has written."""
    size = os.fstat(trainer.memory).st_size
    return os.pread(trainer.memory, size, mmap.PAGESIZE)


def _join(names: Sequence[object]) -> str:
    num_omitted = len(names) - _MAX_NAMED
    text = ", ".join(map(str, names[:_MAX_NAMED]))
    return f"{text} and {num_omitted} more" if num_omitted > 0 else text


if __name__ == "__main__":
    pid, memory, process, processes = map(int, sys.argv[1:5])
    main(WatchedTrainer(pid, memory, process, processes, sys.argv[5]))
    os._exit(0)  # even if a thread still hangs
