"""End a trainer that makes no progress, and write the stacks of all threads.

A collective waits forever for a process that is stuck in Python, and no timeout of JAX
fires. Each process therefore writes its phase and its step to memory that it shares
with a small watchdog process (distributed/watchdog_process.py), which a hang of the
trainer cannot stop:

- If a phase or a step exceeds its deadline, the watchdog ends the trainer with SIGABRT.
- Before that, it writes the stacks of all threads and names the late processes.
- Time in which the machine slept does not count towards a deadline.
- If a trainer aborts by itself, for example after losing a peer, its stacks are written
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

_NUM_INTERVALS = 20  # the number of recent log intervals whose median `pace` uses
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

        `folder` is the run's folder, as an absolute path. The watchdog writes reports
        and stacks to `<folder>/stacks`.
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

        This writes to memory without a system call, so each step can afford it.
        """
        self._num_beats += 1
        self._step = self._step if step is None else step
        timeout_s = self._timeouts_s[self._phase]
        watchdog_process.LAYOUT.pack_into(
            self._page, 0, self._num_beats, self._phase_number, self._step, timeout_s
        )

    def pace(self, seconds_per_log_interval: float) -> None:
        """Raise the step deadline to a multiple of the median recent log interval."""
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

    C code writes the stacks, so that this works even while a thread holds the GIL.
    """
    if os.getpid() == 1:
        # No unhandled signal from inside a container, not even SIGKILL, ends its first
        # process. So `_exit` handles SIGABRT, with exit code 6, after faulthandler has
        # written the stacks.
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, libc._exit)
    # The watchdog dies with a container's first process, before it can store stacks.
    # If this process or its parent is the first, stacks of an abort go to stderr.
    ends_container = 1 in (os.getpid(), os.getppid())
    faulthandler.enable(_STDERR if ends_container else file)
    faulthandler.register(watchdog_process.DUMP, file)


def _start(
    memory: BinaryIO, process: int, processes: int, folder: str
) -> subprocess.Popen[bytes]:
    program = str(Path(watchdog_process.__file__))
    numbers = (os.getpid(), memory.fileno(), process, processes)
    return subprocess.Popen(
        # -P: otherwise modules next to the program would hide those of other packages.
        [sys.executable, "-P", program, *map(str, numbers), folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[memory.fileno()],
        start_new_session=True,  # Ctrl-C does not reach the watchdog.
    )
