"""Keep the report of a run up to date while it trains, from a separate thread."""

import logging
import threading
import time

from etils import epath

log = logging.getLogger(__name__)
_INTERVAL_S = 30.0
_SHARE = 0.01  # writing reports takes at most this share of the time


class LiveReport:
    """Keeps `<run_dir>/report.html` up to date from a separate thread."""

    def __init__(self, run_dir: epath.Path):
        """Schedule the first report."""
        self._run_dir = run_dir
        self._warned = False
        self._due_s = time.monotonic() + _INTERVAL_S
        self._thread: threading.Thread | None = None

    def update(self) -> None:
        """Begin to write a report if one is due; return at once."""
        is_writing = self._thread is not None and self._thread.is_alive()
        if not is_writing and time.monotonic() > self._due_s:
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait a bounded time for a report in progress, then write the last one."""
        if self._thread is not None:
            self._thread.join(_INTERVAL_S)
        self._write(live=False)

    def _write(self, live: bool = True) -> None:
        from train.run.report import write_report  # imported only when needed

        began = time.monotonic()
        try:
            write_report(self._run_dir, live)
        except Exception as error:  # a report must not hide how the run ended
            if not self._warned:
                self._warned = True
                log.warning("%s/report.html was not written: %s", self._run_dir, error)
        duration_s = time.monotonic() - began
        self._due_s = time.monotonic() + max(_INTERVAL_S, duration_s / _SHARE)
