"""Exit a process without waiting for threads that a library has left running.

Python waits at exit for every non-daemon thread. After a failed save, one thread of
Orbax waits 20 minutes for a signal that never comes.
"""

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from train.cli.compat import run_exit_functions
from train.errors import PREEMPTED

log = logging.getLogger(__name__)

GRACE_S = 10.0


def run_and_leave(command: Callable[[], NoReturn]) -> NoReturn:
    """Run a command that trains and ends with `sys.exit`, and `leave` with its code.

    If a preemption notice comes before training begins, exit with PREEMPTED at once.
    After the import of JAX the trainer handles signals itself. Without the handlers
    that are set here, a notice during the import would count as a crash.
    """
    for signal_number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signal_number, lambda *_: os._exit(PREEMPTED))
    try:
        command()
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else bool(end.code))


def leave(code: int) -> NoReturn:
    """Exit with a code as `sys.exit` does, but wait at most `GRACE_S` for threads.

    `atexit` functions are called and output is flushed, even if threads still run.
    """
    threads_ended = threading.Event()
    # Once all non-daemon threads have ended, Python calls the atexit functions, the
    # newest first. So the event is set before any other function is called.
    atexit.register(threads_ended.set)

    def exit_after_grace() -> None:
        if threads_ended.wait(GRACE_S):
            return
        running = (t for t in threading.enumerate() if not t.daemon)
        names = ", ".join(t.name for t in running if t is not threading.main_thread())
        log.warning("leaving, although these threads have not ended: %s", names)
        try:
            run_exit_functions()  # JAX's exit function informs the other processes
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    threading.Thread(target=exit_after_grace, daemon=True).start()
    sys.exit(code)
