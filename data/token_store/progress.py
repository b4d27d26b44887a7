"""How far the encoding of text is, for people."""

import logging
import sys
import time
from typing import Any

_log = logging.getLogger(__name__)


class Meter:
    """Shows how far encoding is: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int):
        """Take the bytes that there are in all."""
        self._total, self._began = total, time.monotonic()
        self._shown = self._began
        self._first: int | None = None
        self._bar: Any = None

    def __enter__(self) -> "Meter":
        """Begin."""
        return self

    def show(self, size: int, tokens: int) -> None:
        """Take the bytes done, those of earlier attempts too, and the new tokens."""
        if self._first is None:
            self._first = size
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if now - self._shown < (0.2 if terminal else 10) or now - self._began < 2:
            return
        self._shown = now
        seconds = now - self._began
        rate = max(1.0, (size - self._first) / seconds)
        text = (
            f"{size / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, "
            f"{tokens / seconds / 1e6:.2f} M tokens/s, "
            f"{max(0, self._total - size) / rate:,.0f} s left"
        )
        if not terminal:
            _log.info("encoding: %s", text)
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("encoding"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
            )
            console = Console(stderr=True)
            self._bar = Progress(*columns, console=console, auto_refresh=False)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, text=text)
        self._bar.update(self._task, completed=size, text=text, refresh=True)

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
