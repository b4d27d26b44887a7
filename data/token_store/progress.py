"""How far the encoding of text is, for people: a bar on a terminal, else plain lines.

Nothing is shown of work that takes less than two seconds.
"""

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_QUIET_S, _LINE_INTERVAL_S = 2.0, 10.0

_log = logging.getLogger(__name__)


class Meter:
    """Shows bytes done, bytes and tokens a second, and the time left."""

    def __init__(self, total: int):
        """Begin; `total` is the bytes that there are in all."""
        console = Console(stderr=True)
        self._total, self._terminal = total, console.is_terminal
        self._began = self._shown = time.monotonic()
        columns = TextColumn("encoding"), BarColumn(), TextColumn("{task.fields[text]}")
        self._bar = Progress(
            *columns,
            console=console,
            disable=not self._terminal,
            redirect_stdout=False,  # results go there
        )
        self._bar.add_task("", total=total, text="")
        (self._task,) = self._bar.tasks

    def __enter__(self) -> "Meter":
        return self

    def show(self, size: int, tokens: int) -> None:
        """Show the bytes done, those of earlier attempts too, and the new tokens."""
        task, now = self._task, time.monotonic()
        seconds = max(now - self._began, 1e-9)
        # The first update counts for no speed: it tells what was done before.
        self._bar.update(task.id, completed=size)
        if seconds < _QUIET_S:
            return
        text = (
            f"{size / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, "
            f"{(task.speed or 0) / 1e6:.1f} MB/s, "
            f"{tokens / seconds / 1e6:.2f} M tokens/s, "
            f"{task.time_remaining or 0:,.0f} s left"
        )
        self._bar.update(task.id, text=text)
        self._bar.start()
        if not self._terminal and now - self._shown >= _LINE_INTERVAL_S:
            self._shown = now
            _log.info("encoding: %s", text)

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is."""
        self._bar.stop()
