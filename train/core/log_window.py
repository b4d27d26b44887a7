"""The steps between two log lines: their metrics, and how their time was spent."""

import logging
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
import numpy as np

from data.config import DataConfig
from data.phases import Phase, tokens_before
from train.config import LogConfig
from train.console import Progress
from train.core.feed import Feed
from train.core.numerics import PREFIX, Culprit, find_culprit, flat_figures
from train.core.program import Program
from train.core.services import Batches, Journal
from train.core.step import Metrics
from train.units import few

_MAX_WAIT_FRACTION = 0.02  # A warning appears if waiting takes a larger share.
_WARNING_AFTER_S = 30.0  # There is no warning before this training time.
_MAX_NAMED = 8  # A note names at most 8 skipped updates; events.jsonl names all.

log = logging.getLogger(__name__)


class LogWindow:
    """Keeps the metrics of steps on the devices until a log line or a save is due."""

    def __init__(
        self,
        programs: Mapping[Phase, Program],
        log: LogConfig,
        data: DataConfig,
        *,
        journal: Journal,
        batches: Batches,
        feed: Feed,
        peak_flops: float | None,
    ):
        """Open the first window.

        `programs` are those of the phases of the run. `peak_flops` are the FLOP/s that
        all devices reach at most together, None if unknown.
        """
        self._programs = programs
        self._log = log
        self._data = data
        self._journal = journal
        self._batches = batches
        self._feed = feed
        self._peak_flops = peak_flops
        self.skipped_in_a_row = 0
        self.culprit: Culprit | None = None  # why steps are skipped, if watched
        self._last_accepted: Metrics | None = None  # Only watched steps are stored.
        # These times exclude the first window, in which the data buffer fills.
        self._trained_s: float | None = None
        self._waited_s = self._lapped_wait_s = 0.0
        self._warned = False
        self._tokens: int | None = None  # the targets of all steps that are read
        self._open()

    def _open(self) -> None:
        self._metrics: list[Metrics] = []
        self._num_read = self._lapped_steps = self._targets = 0
        self._start_s = time.monotonic()
        self._paused_s = 0.0
        self._waited_before_s = self._feed.seconds_waited

    def should_watch(self, step: int) -> bool:
        """Return whether to take the watched step, which returns layer statistics."""
        interval = self._log.numerics_interval_steps
        if interval is None:
            return False
        # The cause of a skipped step often shows in the next step.
        all_read = self._num_read == len(self._metrics)
        return step % interval == 0 or (self.skipped_in_a_row > 0 and all_read)

    def add(self, metrics: Metrics) -> None:
        """Keep the metrics of a dispatched step, without reading them."""
        self._metrics.append(metrics)

    @contextmanager
    def pause(self, event: str) -> Iterator[None]:
        """Record the body as an event, and exclude its time from the step time.

        The devices finish their steps first. Otherwise a body that waits for the
        devices would be charged for the steps in flight.
        """
        jax.block_until_ready(self._metrics[self._num_read :])
        if len(self._metrics) > self._lapped_steps:
            self._lap()
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._journal.events.lap(event)
        self._paused_s += time.monotonic() - start_s

    def _lap(self, **fields: int) -> None:
        """Record the steps since the last lap, and separately their wait for data."""
        waited_s = self._feed.seconds_waited
        self._journal.events.lap(
            "step",
            {"data_wait": waited_s - self._lapped_wait_s},
            steps=len(self._metrics) - self._lapped_steps,
            **fields,
        )
        self._lapped_steps = len(self._metrics)
        self._lapped_wait_s = waited_s

    def read(self, step: int, progress: Progress) -> None:
        """Wait for the devices, and record everything except the log line.

        Call this before a save. A later start continues after the saved steps, and
        reads from the metrics how many tokens they had.
        """
        self._journal.log(step, {"tokens": self._read_all(step, progress)})

    def _read_all(self, step: int, progress: Progress) -> int:
        """Read and record the unread steps; return the number of tokens so far."""
        unread = jax.device_get(self._metrics[self._num_read :])
        self._metrics[self._num_read :] = unread
        self._num_read = len(self._metrics)
        start_step = step - len(unread)
        if self._tokens is None:
            self._tokens = self._journal.tokens_at(start_step)
        targets = sum(int(metrics["targets"]) for metrics in unread)
        self._targets = self._targets + targets
        self._tokens = self._tokens + targets
        self.record(start_step, unread, progress)
        return self._tokens

    def close(self, step: int, progress: Progress, write: bool) -> float:
        """Wait for the devices, show and record the window, and open the next one.

        With `write`, `step` gets a line in metrics.jsonl. Returns the duration of the
        window's steps, in seconds.
        """
        tokens = self._read_all(step, progress)
        num_steps = len(self._metrics)
        seconds = time.monotonic() - self._start_s - self._paused_s
        waited_s = self._feed.seconds_waited - self._waited_before_s
        last_metrics = self._metrics[-1]
        tokens_per_s = self._targets / seconds
        program = self._programs[self._batches.phase(step - 1)]
        flops_per_s = tokens_per_s * _flops_per_token(program)
        mfu = flops_per_s / self._peak_flops if self._peak_flops else None
        self._lap(step=step)
        if warning := self._data_warning(seconds, waited_s):
            progress.note(warning)
        mean_loss = self._mean_loss()
        memory_bytes = memory_in_use()
        last_loss = float(last_metrics["loss"])
        progress.update(
            step,
            last_loss,
            tokens_per_s,
            mfu,
            mean_loss if num_steps > 1 else None,
            memory_bytes,
        )
        if write:
            values = {
                "loss_mean": mean_loss,
                "tokens": tokens,
                "positions": tokens_before(self._data, step),
                "memory_bytes": math.nan if memory_bytes is None else memory_bytes,
                "flops": tokens * self._mean_flops_per_token(step),
                "tokens_per_second": tokens_per_s,
                "step_seconds": seconds / num_steps,
                "mfu": math.nan if mfu is None else mfu,
            }
            self._journal.log(step, _as_line(last_metrics) | values)
        self._open()
        return seconds

    def _mean_loss(self) -> float:
        """Return the mean loss of the window's steps; NaN if all were skipped.

        Skipped updates do not count: their losses may be spikes or not finite.
        """
        losses = [float(m["loss"]) for m in self._metrics if not m["skipped"]]
        return sum(losses) / len(losses) if losses else math.nan

    def _mean_flops_per_token(self, step: int) -> float:
        """Return the mean model FLOPs of a token of all phases until a step."""
        stop = self._batches.batch_number(step - 1) + 1
        tokens = 0
        flops = 0.0
        for phase, program in reversed([*self._programs.items()]):
            if phase.first_batch < stop:
                phase_tokens = phase.token(stop) - phase.first_token
                tokens += phase_tokens
                flops += phase_tokens * _flops_per_token(program)
                stop = phase.first_batch
        return flops / tokens

    def record(self, start_step: int, steps: list[Metrics], progress: Progress) -> None:
        """Record the layer statistics, and name the updates that were skipped.

        `start_step` is the number of updates that were completed before `steps`, whose
        metrics are on the host.
        """
        skipped = []
        for step, metrics in enumerate(steps, start_step + 1):
            if figures := flat_figures(metrics):
                self._journal.log(step, figures)
            if not metrics["skipped"]:
                self.skipped_in_a_row = 0
                self.culprit = None
                self._last_accepted = metrics if figures else self._last_accepted
                continue
            self.skipped_in_a_row += 1
            values = {key: float(metrics[key]) for key in ("loss", "grad_norm")}
            reason = "the update overflows" if metrics.get("overflow") else "spike"
            if not all(map(math.isfinite, values.values())):
                reason = "not finite"
            batch = self._batches.batch_number(step - 1)
            event = {"step": step, "batch": batch, **values, "reason": reason}
            if figures and (culprit := find_culprit(metrics, self._last_accepted)):
                self.culprit = culprit
                reason = f"{reason}, {culprit}"
                event |= culprit._asdict()
            self._journal.events.record("skipped", **event)
            skipped.append(f"step {step:,} (batch {batch:,}, {reason})")
        if skipped:
            progress.note(f"updates skipped: {few(skipped, _MAX_NAMED)}")

    def _data_warning(self, seconds: float, waited_s: float) -> str | None:
        """Return a warning, once, if training has waited too long for data."""
        if self._trained_s is None:
            self._trained_s = 0.0
            return None
        self._trained_s += seconds
        self._waited_s += waited_s
        fraction = self._waited_s / self._trained_s
        is_slow = self._trained_s >= _WARNING_AFTER_S and fraction > _MAX_WAIT_FRACTION
        if self._warned or not is_slow:
            return None
        self._warned = True
        return (
            f"{fraction:.1%} of the training time is spent waiting for data: use a "
            f"data.prefetch above {self._data.prefetch}, or move the "
            "token store closer to this machine"
        )


def memory_in_use() -> int | None:
    """Return the largest use of memory so far on a local device, in bytes.

    The memory of a CPU is that of this process. None if it is not known.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if stat]
    if peaks or jax.default_backend() != "cpu":
        return max(peaks, default=None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _flops_per_token(program: Program) -> float:
    """Return the model FLOPs of a token of a step."""
    return program.flops_per_step / program.tokens_per_step


def _as_line(metrics: Metrics) -> dict[str, float]:
    """Return all metrics of a step, except the layer statistics (`flat_figures`).

    For a metric with a value per layer, the line has a key for each layer, and the
    largest value under the name of the metric.
    """
    metrics = {k: v for k, v in metrics.items() if not k.startswith(PREFIX)}
    values = {name: float(np.max(value)) for name, value in metrics.items()}
    for name, value in metrics.items():
        if np.ndim(value):
            values |= {f"{name}/{i}": float(x) for i, x in enumerate(value)}
    return values
