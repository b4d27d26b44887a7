"""What the libraries say of a save that failed: nothing, since we say it in a line.

A failure is an exception that `run/checkpoint.py` is given. Orbax logs it too, seven
times over, with tracebacks; and what is left to do is reported to an event loop that
Orbax has closed, at six lines each: a thousand lines, in which ours would be lost.

Source: orbax-checkpoint 0.12.8, tensorstore 0.1.80.
"""

import functools
import logging
import sys
from typing import Any


@functools.cache
def say_failures_once() -> None:
    """Leave it to us to say which save failed, and why."""
    logging.getLogger("absl").addFilter(lambda record: not record.exc_info)
    before = sys.unraisablehook

    def hook(found: Any) -> None:
        if str(found.exc_value) != "Event loop is closed":
            before(found)

    sys.unraisablehook = hook
