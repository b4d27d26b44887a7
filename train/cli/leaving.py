"""The end of a process: threads that a library has left behind do not delay it.

Python waits at its end for every thread that is not a daemon. After a save that failed
one of Orbax's waits 20 minutes for a signal that will not come.
"""

import atexit
import logging
import os
import sys
import threading
from typing import NoReturn

log = logging.getLogger(__name__)

GRACE_S = 10.0


def leave(code: int) -> NoReturn:
    """End the process with an exit code, as `sys.exit` does.

    If threads go on for `GRACE_S`, they are left behind. What is registered with
    `atexit` is called, and output is flushed, in either case.
    """
    threads_ended = threading.Event()
    # Python calls these functions after the last thread, and the newest of them first.
    atexit.register(threads_ended.set)

    def leave_threads_behind() -> None:
        if threads_ended.wait(GRACE_S):
            return
        running = (t for t in threading.enumerate() if not t.daemon)
        names = ", ".join(t.name for t in running if t is not threading.main_thread())
        log.warning("leaving, although these threads have not ended: %s", names)
        try:
            atexit._run_exitfuncs()  # such as JAX's, which tells the other processes
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    threading.Thread(target=leave_threads_behind, daemon=True).start()
    sys.exit(code)
