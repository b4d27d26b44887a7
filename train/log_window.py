"""The steps between two log lines: their metrics, and how their time was spent."""

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
from train.units import few

# Warn about slow data if waiting takes this fraction of at least this training time.
_MUCH_WAITING, _WARNING_AFTER_S = 0.02, 30.0
_NAMED = 8  # skipped updates that one note names; events.jsonl names all

log = logging.getLogger(__name__)


class LogWindow:
    """Collects device metrics unread, and reads them all at once when it closes."""

    def __init__(self, program: Program, run: RunDir, order: Order, feed: Feed):
        """Open the first window."""
        self._program, self._run, self._order, self._feed = program, run, order, feed
        peak = peak_flops(program.mesh.devices.flat[0].device_kind)
        self.peak = peak and peak * program.mesh.size
        self.skipped_in_a_row = 0
        self.culprit: Culprit | None = None  # the layer to blame, if one was watched
        self._accepted: Metrics | None = None  # the last watched step not skipped
        # Training and waiting time, without the first window, which fills the buffer.
        self._trained_s: float | None = None
        self._waited_s = self._lapped_wait = 0.0
        self._warned = False
        self._tokens: int | None = None  # targets of all steps so far, once known
        self._open()

    def _open(self) -> None:
        self._metrics: list[Metrics] = []
        self._read = self._lapped_steps = self._targets = 0
        self._began, self._paused = time.monotonic(), 0.0
        self._waited = self._feed.seconds_waited

    def is_to_watch(self, step: int) -> bool:
        """Return whether a step shall return statistics of its layers."""
        interval = self._program.config.log.numerics_interval_steps
        if interval is None:
            return False
        # The cause of a skipped step often shows in the next one.
        all_read = self._read == len(self._metrics)
        return step % interval == 0 or (self.skipped_in_a_row > 0 and all_read)

    def add(self, metrics: Metrics) -> None:
        """Keep the metrics of a dispatched step, without reading them."""
        self._metrics.append(metrics)

    @contextmanager
    def pause(self, event: str) -> Iterator[None]:
        """Exclude the body from the step time, and record it as an event.

        It first waits for the devices. Otherwise a body that waits for them would be
        charged for the steps in flight.
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
        """Record the steps since the last lap, and separately their wait for data."""
        waited = self._feed.seconds_waited
        self._run.events.lap(
            "step",
            {"data_wait": waited - self._lapped_wait},
            steps=len(self._metrics) - self._lapped_steps,
            **fields,
        )
        self._lapped_steps, self._lapped_wait = len(self._metrics), waited

    def read(self, step: int, progress: Progress) -> None:
        """Wait for the devices, and record everything except the log line.

        Call it before a save. No later start repeats the steps that the save holds, so
        the number of tokens so far is recorded too.
        """
        self._run.log(step, {"tokens": self._read_all(step, progress)})

    def _read_all(self, step: int, progress: Progress) -> int:
        """Read and record the unread steps; return the number of tokens so far."""
        steps = jax.device_get(self._metrics[self._read :])
        self._metrics[self._read :] = steps
        self._read, first = len(self._metrics), step - len(steps)
        if self._tokens is None:
            run, per_step = self._run, self._program.tokens_per_step
            self._tokens = tokens_at(run.path, first, per_step) if run.write else 0
        targets = sum(int(metrics["targets"]) for metrics in steps)
        self._targets, self._tokens = self._targets + targets, self._tokens + targets
        self.record(first, steps, progress)
        return self._tokens

    def close(self, step: int, progress: Progress, write: bool) -> float:
        """Wait for the devices, show and record the window, and open the next one.

        With `write`, `step` gets a line in metrics.jsonl. Returns the duration of the
        window's steps, in seconds.
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
        if warning := self._data_warning(seconds, waited):
            progress.note(warning)
        progress.update(step, float(last["loss"]), speed, mfu)
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

    def record(self, first: int, steps: list[Metrics], progress: Progress) -> None:
        """Record statistics of layers, and name the updates that were skipped.

        Args:
            first: the number of updates that were completed before these steps.
            steps: the metrics of the steps, on the host.
            progress: the display.
        """
        skipped = []
        for step, metrics in enumerate(steps, first + 1):
            if statistics := by_layer(metrics):
                self._run.log(step, statistics)
            if not metrics["skipped"]:
                self.skipped_in_a_row, self.culprit = 0, None
                self._accepted = metrics if statistics else self._accepted
                continue
            self.skipped_in_a_row += 1
            values = {key: float(metrics[key]) for key in ("loss", "grad_norm")}
            reason = "the update overflows" if metrics.get("overflow") else "spike"
            if not all(map(math.isfinite, values.values())):
                reason = "not finite"
            batch = self._order.batch_number(step - 1)
            event = {"step": step, "batch": batch, **values, "reason": reason}
            if statistics and (layer := culprit(metrics, self._accepted)):
                self.culprit, reason = layer, f"{reason}, {layer}"
                event |= layer._asdict()
            self._run.events.record("skipped", **event)
            skipped.append(f"step {step:,} (batch {batch:,}, {reason})")
        if skipped:
            progress.note(f"updates skipped: {few(skipped, _NAMED)}")

    def _data_warning(self, seconds: float, waited: float) -> str | None:
        """Return a warning once, after the window that shows that data is slow."""
        if self._trained_s is None:
            self._trained_s = 0.0
            return None
        self._trained_s += seconds
        self._waited_s += waited
        fraction = self._waited_s / self._trained_s
        is_slow = self._trained_s >= _WARNING_AFTER_S and fraction > _MUCH_WAITING
        if self._warned or not is_slow:
            return None
        self._warned = True
        return (
            f"{fraction:.1%} of the training time is spent waiting for data: use a "
            f"data.prefetch above {self._program.config.data.prefetch}, or move the "
            "token store closer to this machine"
        )


def _as_line(metrics: Metrics) -> dict[str, float]:
    """Return all metrics of a step, except the statistics that `by_layer` returns.

    A metric with a value for each layer gets a key for each value, and its largest
    value under its own name.
    """
    shown = {k: v for k, v in metrics.items() if not k.startswith(PREFIX)}
    values = {name: float(np.max(value)) for name, value in shown.items()}
    for name, value in shown.items():
        if np.ndim(value):
            values |= {f"{name}/{i}": float(x) for i, x in enumerate(value)}
    return values
