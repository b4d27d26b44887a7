"""Protocols of the report and of the trackers, which show a run while it trains."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from etils import epath

from train.config import TrackerConfig
from train.run.trackers.writer import TrackedRun


class Report(Protocol):
    """Keeps a report of the run up to date (train/run/live_report.py)."""

    def update(self) -> None:
        """Begin to write a report if one is due; return at once."""
        ...

    def close(self) -> None:
        """Write the last report."""
        ...


class RunTracker(Protocol):
    """Copies metrics elsewhere (train/run/tracker.py)."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the values of a step; return at once."""
        ...

    def finish(self) -> None:
        """Wait a bounded time until all queued values are stored."""
        ...


class RunViews(NamedTuple):
    """Functions that open the views of a run."""

    open_report: Callable[[epath.Path], Report]
    open_tracker: Callable[[TrackerConfig, TrackedRun], RunTracker]
