"""Show the progress of making a store: a bar on a terminal, otherwise lines in the log.

Work that takes less than two seconds shows nothing.
"""

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_QUIET_S = 2.0
_LINE_INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


class Meter(Progress):
    """Shows bytes done, bytes and tokens a second, and the time left."""

    def __init__(self, total: int, label: str = "encoding"):
        """Begin to count up to `total` bytes; `label` names the work."""
        columns = label, BarColumn(), TextColumn("{task.description}")
        # The bar goes to stderr, because commands print their results to stdout.
        super().__init__(*columns, console=Console(stderr=True), redirect_stdout=False)
        self.disable = not self.console.is_terminal
        self._label = label
        self._total = total
        self._start_s = time.monotonic()
        self._last_line_s = self._start_s
        self._task = self._tasks[self.add_task("", total=total)]

    def __enter__(self) -> "Meter":
        return self  # `show` starts the display, after a delay

    def show(self, size: int, tokens: int) -> None:
        """Show the bytes done in all attempts, and the tokens encoded in this one."""
        task = self._task
        now_s = time.monotonic()
        seconds = now_s - self._start_s
        # The first update includes earlier attempts; rich leaves it out of the speed.
        self.update(task.id, completed=size)
        if seconds < _QUIET_S:
            return
        text = (
            f"{size / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, "
            f"{(task.speed or 0) / 1e6:.1f} MB/s, "
            f"{tokens / seconds / 1e6:.2f} M tokens/s, "
            f"{task.time_remaining or 0:,.0f} s left"
        )
        self.update(task.id, description=text)
        self.start()
        if self.disable and now_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now_s
            _log.info("%s: %s", self._label, text)
