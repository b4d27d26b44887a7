"""Exit a process at once on a notice, or without waiting for leftover threads.

Python waits at exit for every non-daemon thread. After a failed save, one thread of
Orbax waits 20 minutes for a signal that never comes.
"""

import atexit
import logging
import os
import signal
import sys
import threading
from typing import NoReturn

from train.cli.compat import run_exit_functions
from train.errors import PREEMPTED

log = logging.getLogger(__name__)

GRACE_S = 10.0


def exit_on_preemption() -> None:
    """Exit with PREEMPTED at once if a preemption notice comes before training begins.

    After the import of JAX the trainer handles signals itself. Without these handlers,
    a notice during the import would count as a crash.
    """
    for signal_number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signal_number, lambda *_: os._exit(PREEMPTED))


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
