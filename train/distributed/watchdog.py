"""End a trainer that makes no progress, and write the stacks of all threads.

A collective waits forever for a process that is stuck in Python, and no timeout of JAX
fires. Each process therefore writes its phase and its steps to memory that it shares
with a small watchdog process (distributed/watchdog_process.py), which a hang of the
trainer cannot stop:

- A phase or a step that exceeds its deadline ends the process with SIGABRT.
- Before that, the stacks of all threads are written, and the late processes are named.
- Time in which the machine slept does not count.
- A trainer that aborts by itself, for example after losing a peer, leaves its stacks
  too.
"""

import ctypes
import faulthandler
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from etils import epath

from train.config import WatchdogConfig
from train.distributed import watchdog_process

_NUM_INTERVALS = 20  # the number of recent log intervals whose median is the pace
_STDERR = 2


class Watchdog:
    """Watches this process until `close`; the first phase is `init`.

    Only the thread that trains may use it.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        folder: epath.Path | Path,
        process: int,
        processes: int,
    ):
        """Start to watch; if the config disables the watchdog, no method has an effect.

        Reports and stacks go to `stacks` in the run's absolute folder.
        """
        self._config = config
        steps_s = dict.fromkeys(("log", "data", "step"), config.step_timeout_s)
        self._timeouts_s: dict[str, float] = {
            **steps_s,
            "init": config.init_timeout_s,
            "compile": config.compile_timeout_s,
            "restore": config.restore_timeout_s,
            "eval": config.eval_timeout_s,
            "save": config.save_timeout_s,
        }
        self._num_beats = self._step = 0
        self._intervals_s = deque[float](maxlen=_NUM_INTERVALS)
        self._page: bytearray | mmap.mmap = bytearray(watchdog_process.LAYOUT.size)
        self._memory: BinaryIO | None = None
        if config.enabled:
            self._memory = _shared_memory()
            self._page = mmap.mmap(self._memory.fileno(), mmap.PAGESIZE)
        self.phase("init")
        if self._memory:
            _dump_stacks_to(self._memory)
            self._child = _start(self._memory, process, processes, f"{folder}/stacks")

    def phase(self, name: str, step: int | None = None) -> None:
        """Enter a phase of `watchdog_process.PHASES`, and restart its deadline.

        `data` (the wait for a batch) and `log` (the work after a step) may take as long
        as `step`. `step` is the number of completed updates; None if unchanged.
        """
        self._phase = name
        self._phase_number = watchdog_process.PHASES.index(name)
        self.beat(step)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Enter a phase for the block, and return to the previous phase afterwards."""
        previous_phase = self._phase
        self.phase(name)
        yield
        self.phase(previous_phase)

    def beat(self, step: int | None = None) -> None:
        """Record progress, which restarts the deadline of the phase.

        This only writes to memory, without a system call: cheap enough for each step.
        """
        self._num_beats += 1
        self._step = self._step if step is None else step
        timeout_s = self._timeouts_s[self._phase]
        watchdog_process.LAYOUT.pack_into(
            self._page, 0, self._num_beats, self._phase_number, self._step, timeout_s
        )

    def pace(self, seconds_per_log_interval: float) -> None:
        """Raise the deadline of a step to a multiple of the recent log intervals."""
        self._intervals_s.append(seconds_per_log_interval)
        median_s = statistics.median(self._intervals_s)
        multiple_s = self._config.step_timeout_factor * median_s
        timeout_s = max(self._config.step_timeout_s, multiple_s)
        self._timeouts_s |= dict.fromkeys(("log", "data", "step"), timeout_s)
        self.beat()

    def close(self) -> None:
        """Stop watching."""
        if self._memory and not self._memory.closed:
            self._child.kill()
            self._child.wait()
            faulthandler.unregister(watchdog_process.DUMP)
            faulthandler.enable(_STDERR)
            self._memory.close()


def _shared_memory() -> BinaryIO:
    """Return an anonymous file in memory, because a beat must not wait for a disk."""
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("watchdog"), "w+b", buffering=0)
    else:  # macOS
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    file.truncate(mmap.PAGESIZE)
    file.seek(mmap.PAGESIZE)
    return file


def _dump_stacks_to(file: BinaryIO) -> None:
    """Write the stacks of all threads on the signal DUMP and when the process aborts.

    C code writes the stacks at once, even while a thread holds the GIL forever.
    """
    if os.getpid() == 1:
        # The kernel spares a container's first process each signal that it does not
        # handle, even SIGKILL. faulthandler calls this handler last. Exit code 6.
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, libc._exit)
    # All other processes, and the watchdog, die with a container's first process.
    ends_container = 1 in (os.getpid(), os.getppid())
    faulthandler.enable(_STDERR if ends_container else file)
    faulthandler.register(watchdog_process.DUMP, file)


def _start(
    memory: BinaryIO, process: int, processes: int, folder: str
) -> subprocess.Popen[bytes]:
    program = str(Path(watchdog_process.__file__))
    numbers = (os.getpid(), memory.fileno(), process, processes)
    return subprocess.Popen(
        # -P: modules next to the program must not hide those of other packages.
        [sys.executable, "-P", program, *map(str, numbers), folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[memory.fileno()],
        start_new_session=True,  # Ctrl-C does not reach it
    )
