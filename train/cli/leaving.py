"""End a process without waiting for threads that a library has left behind.

Python waits at its end for every thread that is not a daemon. After a failed save, one
of Orbax's threads waits 20 minutes for a signal that will not come.
"""

import atexit
import logging
import os
import sys
import threading
from typing import NoReturn

from train.cli.compat import run_exit_functions

log = logging.getLogger(__name__)

GRACE_S = 10.0


def leave(code: int) -> NoReturn:
    """End the process with an exit code, as `sys.exit` does.

    Threads that still run after `GRACE_S` are left behind. In either case the functions
    of `atexit` are called, and output is flushed.
    """
    threads_ended = threading.Event()
    # Python calls functions of atexit after the last thread, the newest one first.
    atexit.register(threads_ended.set)

    def leave_threads_behind() -> None:
        if threads_ended.wait(GRACE_S):
            return
        running = (t for t in threading.enumerate() if not t.daemon)
        names = ", ".join(t.name for t in running if t is not threading.main_thread())
        log.warning("leaving, although these threads have not ended: %s", names)
        try:
            run_exit_functions()  # JAX's tells the other processes
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    threading.Thread(target=leave_threads_behind, daemon=True).start()
    sys.exit(code)
