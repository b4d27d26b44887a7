"""Progress and tables on the terminal.

Progress goes to stderr, and tables go to stdout. On a terminal, rich draws both.
Otherwise (files, pipes, cluster logs) both are plain lines, never wrapped or truncated.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from train.units import format_bytes, format_count, format_seconds

_PLAIN_INTERVAL_S = 5.0


class Progress:
    """Shows the completed steps and the speed of training.

    start_step: the number of updates that were completed before this start.
    peak_known: whether the peak FLOP/s are known, so that MFU can be shown.
    show: whether anything is shown; False on every process except the first.
    """

    def __init__(
        self, num_steps: int, start_step: int, peak_known: bool, show: bool = True
    ):
        self._num_steps = num_steps
        self._peak_known = peak_known
        self._show = show
        self._first_update: tuple[int, float] | None = None
        self._printed_s = float("-inf")
        self._unprinted_line = ""
        self._bar = None
        console = Console(stderr=True)
        if show and console.is_terminal:
            self._bar = RichProgress(
                TextColumn("[bold]{task.completed:,.0f}[/]/{task.total:,.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}"),
                console=console,
                expand=True,
                refresh_per_second=2,
                # Tables go to stdout, which rich would redirect to this console.
                redirect_stdout=False,
            )
            self._task = self._bar.add_task(
                "", total=num_steps, completed=start_step, figures="first steps"
            )
            self._bar.start()

    def update(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        mfu: float | None,
        mean_loss: float | None = None,
        memory_bytes: float | None = None,
    ) -> None:
        """Show the loss and the speed of the log interval that ended with `step`.

        Without a bar, the first call and the last step print a line, and the calls
        between them print one at most every five seconds. `mfu` is a fraction, or None.
        `mean_loss` is the mean over the interval, None if it had one step.
        """
        if not self._show:
            return
        loss_text = f"loss {loss:.4f}"
        if mean_loss is not None:
            loss_text += f" (mean {mean_loss:.4f})"
        figures = [loss_text, f"{format_count(tokens_per_second)} tokens/s"]
        if memory_bytes is not None:
            figures.append(format_bytes(memory_bytes))
        if self._peak_known and mfu is not None:
            figures.append(f"MFU {mfu:.1%}")
        left_s = self._seconds_left(step)
        if left_s is not None and step < self._num_steps:
            figures.append(f"{format_seconds(left_s)} left")
        if self._bar:
            text = " · ".join(figures)
            self._bar.update(self._task, completed=step, figures=text)
            return
        line = f"step {step:,}/{self._num_steps:,}  " + "  ".join(figures)
        now = time.monotonic()
        if step >= self._num_steps or now - self._printed_s >= _PLAIN_INTERVAL_S:
            self._printed_s = now
            self._unprinted_line = ""
            print(line, file=sys.stderr, flush=True)
        else:
            self._unprinted_line = line

    def note(self, text: str) -> None:
        """Print a separate line, above the bar if there is one."""
        if not self._show:
            return
        if self._bar:
            self._bar.console.print(Text(text))
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Stop the bar, or print the newest plain line if it is not printed yet."""
        if self._bar:
            self._bar.stop()
        elif self._unprinted_line:
            print(self._unprinted_line, file=sys.stderr, flush=True)
            self._unprinted_line = ""

    def _seconds_left(self, step: int) -> float | None:
        # The clock starts at the first call of `update`, which excludes compilation.
        now = time.monotonic()
        if self._first_update is None:
            self._first_update = (step, now)
        first_step, first_s = self._first_update
        done_steps = step - first_step
        spent_s = now - first_s
        left_steps = self._num_steps - step
        return left_steps * spent_s / done_steps if done_steps > 0 else None


@contextmanager
def show_compilation(show: bool = True) -> Iterator[None]:
    """Show that the body compiles the step, and how long it has taken so far.

    Without a terminal, a line at the beginning and one at the end say so. Nothing is
    shown unless `show`.
    """
    if not show:
        yield
        return
    console = Console(stderr=True)
    begin_s = time.monotonic()
    if console.is_terminal:
        columns = TextColumn("compiling the training step"), TimeElapsedColumn()
        with RichProgress(*columns, console=console, redirect_stdout=False) as bar:
            bar.add_task("", total=None)
            yield
        return
    print("compiling   the training step", file=sys.stderr, flush=True)
    yield
    duration = format_seconds(time.monotonic() - begin_s)
    print(f"compiled    in {duration}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Escape control characters as `repr` does, except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def print_table(
    rows: Sequence[Sequence[object]], headers: Sequence[str], title: str
) -> None:
    """Print a table to stdout; columns of numbers (`1.5 GiB`, `12 %`) align right."""
    cells = [[str(cell) for cell in row] for row in rows]
    is_numeric = [
        bool(cells) and all(row[i][:1] in "0123456789-+.~" for row in cells)
        for i in range(len(headers))
    ]
    console = Console()
    if console.is_terminal:
        table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left")
        for header, is_number in zip(headers, is_numeric, strict=True):
            justify = "right" if is_number else "left"
            table.add_column(Text(header), justify=justify, overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    lines = [list(headers), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    print(title)
    for line in lines:
        aligned = (
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(line, widths, is_numeric, strict=True)
        )
        print("  ".join(aligned).rstrip())
