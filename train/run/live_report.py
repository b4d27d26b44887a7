"""Rewrite the report of a live run from time to time, during training."""

import logging
import threading
import time

from etils import epath

log = logging.getLogger(__name__)
_INTERVAL_S = 30.0
_SHARE = 0.01  # the largest fraction of the time to spend on writing it


class LiveReport:
    """Keeps `<run_dir>/report.html` up to date from a thread of its own."""

    def __init__(self, run_dir: epath.Path):
        """Begin; nothing is written yet."""
        self._run_dir, self._warned = run_dir, False
        self._due_s = time.monotonic() + _INTERVAL_S
        self._thread: threading.Thread | None = None

    def update(self) -> None:
        """Begin to write, if it is time and the last one is through; return at once."""
        writing = self._thread is not None and self._thread.is_alive()
        if not writing and time.monotonic() > self._due_s:
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for a while for one that is being written, and write the last one."""
        if self._thread is not None:
            self._thread.join(_INTERVAL_S)
        self._write(live=False)

    def _write(self, live: bool = True) -> None:
        from train.run.report import write_report  # steps do not need it

        began = time.monotonic()
        try:
            write_report(self._run_dir, live)
        except Exception as error:  # it must not hide how the run ended
            if not self._warned:
                self._warned = True
                log.warning("%s/report.html was not written: %s", self._run_dir, error)
        took_s = time.monotonic() - began
        self._due_s = time.monotonic() + max(_INTERVAL_S, took_s / _SHARE)
