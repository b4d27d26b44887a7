"""The steps between two log lines: their metrics and what their time went to."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np

from data.batches import Order
from train.console import Progress
from train.feed import Feed
from train.hardware.chips import peak_flops
from train.numerics import PREFIX, Culprit, by_layer, culprit
from train.program import Program
from train.run.directory import RunDir
from train.run.metrics import tokens_at
from train.step import Metrics

# A warning about slow data needs this share of the training time, over so many seconds.
_MUCH_WAITING, _WARNING_AFTER_S = 0.02, 30.0
_NAMED = 8  # updates left out that one note names; events.jsonl names all

log = logging.getLogger(__name__)


class LogWindow:
    """Collects device metrics unread, and reads them all at once when it closes."""

    def __init__(self, program: Program, run: RunDir, order: Order, feed: Feed):
        """Open the first window."""
        self._program, self._run, self._order, self._feed = program, run, order, feed
        peak = peak_flops(program.mesh.devices.flat[0].device_kind)
        self.peak = peak and peak * program.mesh.size
        self.skipped_in_a_row = 0
        self.culprit: Culprit | None = None  # to blame for these, if one was watched
        self._watched: Metrics | None = None  # the last such step that was accepted
        self._trained_s = self._waited_s = 0.0  # since the end of the first window
        self._first_window = True  # it also fills the buffer of batches
        self._warned = False
        self._lapped_wait = 0.0
        self._tokens: int | None = None  # targets of all steps so far; None: not known
        self._open()

    def _open(self) -> None:
        self._metrics: list[Metrics] = []
        self._read = self._lapped_steps = self._targets = 0
        self._began, self._paused = time.monotonic(), 0.0
        self._waited = self._feed.seconds_waited

    def is_to_watch(self, step: int) -> bool:
        """Tell whether a step is to have figures of its layers."""
        interval = self._program.config.log.numerics_interval_steps
        if interval is None:
            return False
        # What spoiled the last step may spoil the next, and is seen there.
        all_read = self._read == len(self._metrics)
        return step % interval == 0 or (self.skipped_in_a_row > 0 and all_read)

    def add(self, metrics: Metrics) -> None:
        """Keep the metrics of a step that was dispatched, unread."""
        self._metrics.append(metrics)

    @contextmanager
    def pause(self, event: str) -> Iterator[None]:
        """Exclude what the body does from the step time; record it as an event.

        Waits for the devices before: a body that does would otherwise be taken to have
        spent the time of the steps that were dispatched.
        """
        jax.block_until_ready(self._metrics[self._read :])
        if len(self._metrics) > self._lapped_steps:
            self._lap()
        began = time.monotonic()
        try:
            yield
        finally:
            self._run.events.lap(event)
        self._paused += time.monotonic() - began

    def _lap(self, **fields: int) -> None:
        """Record the steps since the last lap, apart from what they waited for data."""
        waited = self._feed.seconds_waited
        self._run.events.lap(
            "step",
            {"data_wait": waited - self._lapped_wait},
            steps=len(self._metrics) - self._lapped_steps,
            **fields,
        )
        self._lapped_steps, self._lapped_wait = len(self._metrics), waited

    def read(self, step: int, progress: Progress) -> None:
        """Wait for the devices, and record what steps tell besides their line.

        It comes before a save: no start does again what that holds, so the number of
        tokens so far gets a line too.

        Args:
            step: completed updates.
            progress: what the user sees.
        """
        self._run.log(step, {"tokens": self._read_all(step, progress)})

    def _read_all(self, step: int, progress: Progress) -> int:
        """Read and record the steps that are unread; return the tokens so far."""
        steps = jax.device_get(self._metrics[self._read :])
        self._metrics[self._read :] = steps
        self._read, before = len(self._metrics), step - len(steps)
        if self._tokens is None:
            run, per_step = self._run, self._program.tokens_per_step
            self._tokens = tokens_at(run.path, before, per_step) if run.write else 0
        targets = sum(int(metrics["targets"]) for metrics in steps)
        self._targets, self._tokens = self._targets + targets, self._tokens + targets
        self.record(before, steps, progress)
        return self._tokens

    def close(self, step: int, progress: Progress, write: bool) -> float:
        """Wait for the devices, show and record the window, open the next.

        Args:
            step: completed updates.
            progress: what the user sees.
            write: whether `step` gets its line in metrics.jsonl.

        Returns:
            The seconds that its steps took.
        """
        tokens = self._read_all(step, progress)
        steps = self._metrics
        seconds = time.monotonic() - self._began - self._paused
        waited = self._feed.seconds_waited - self._waited
        program, last = self._program, steps[-1]
        flops_per_token = program.flops_per_step / program.tokens_per_step
        speed = self._targets / seconds
        mfu = flops_per_token * speed / self.peak if self.peak else None
        self._lap(step=step)
        self._warn(seconds, waited, progress)
        loss = float(last["loss"])
        progress.update(step, loss, speed, mfu)
        if write:
            values = {
                "tokens": tokens,
                "flops": tokens * flops_per_token,
                "tokens_per_second": speed,
                "step_seconds": seconds / len(steps),
                "mfu": math.nan if mfu is None else mfu,
            }
            self._run.log(step, _as_line(last) | values)
        self._open()
        return seconds

    def record(self, before: int, steps: list[Metrics], progress: Progress) -> None:
        """Record figures of layers, and name the updates that were left out."""
        named = []
        for step, metrics in enumerate(steps, before + 1):
            if figures := by_layer(metrics):
                self._run.log(step, figures)
            if not metrics["skipped"]:
                self.skipped_in_a_row, self.culprit = 0, None
                self._watched = metrics if figures else self._watched
                continue
            self.skipped_in_a_row += 1
            values = {key: float(metrics[key]) for key in ("loss", "grad_norm")}
            reason = "the update overflows" if metrics.get("overflow") else "spike"
            if not all(map(math.isfinite, values.values())):
                reason = "not finite"
            batch = self._order.batch_number(step - 1)
            of_step = {"step": step, "batch": batch, **values, "reason": reason}
            if figures and (found := culprit(metrics, self._watched)):
                self.culprit, reason = found, f"{reason}, {found}"
                of_step |= found._asdict()
            self._run.events.record("skipped", **of_step)
            named.append(f"step {step:,} (batch {batch:,}, {reason})")
        if named:
            more = f" and {len(named) - _NAMED:,} more" if named[_NAMED:] else ""
            progress.note(f"updates left out: {', '.join(named[:_NAMED])}{more}")

    def _warn(self, seconds: float, waited: float, progress: Progress) -> None:
        """Note once that training waits for data, and what to do.

        Args:
            seconds: that the window took.
            waited: seconds of these in which no batch was there.
            progress: what the user sees.
        """
        if self._first_window or self._warned:
            self._first_window = False
            return
        self._trained_s += seconds
        self._waited_s += waited
        share = self._waited_s / self._trained_s
        if self._trained_s >= _WARNING_AFTER_S and share > _MUCH_WAITING:
            self._warned = True
            progress.note(
                f"{share:.1%} of the training time is spent waiting for data: use a "
                f"data.prefetch above {self._program.config.data.prefetch}, or bring "
                "the token store nearer to this machine"
            )


def _as_line(metrics: Metrics) -> dict[str, float]:
    """Return all metrics of a step, but for the figures that `by_layer` gives.

    A metric of several layers has a key for each of them, and its largest value under
    its own name.
    """
    values = dict[str, float]()
    for name, value in metrics.items():
        if name.startswith(PREFIX):
            continue
        values[name] = float(np.max(value))
        if np.ndim(value):
            values |= {f"{name}/{i}": float(each) for i, each in enumerate(value)}
    return values
