"""The interface to a tracker's library, used on a thread of `train/run/tracker.py`."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

Line = tuple[int, Mapping[str, float]]  # the step, and the metrics by name


@dataclass(frozen=True)
class TrackedRun:
    """A start of a run whose metrics a tracker receives.

    run_dir: the run's directory; its `metrics.jsonl` has no lines after `step`.
    name: the name to show.
    config: the config to show, without secrets.
    step: completed updates of the restored state.
    start: the number of the start, from 1.
    """

    run_dir: epath.Path
    name: str
    config: dict[str, Any]
    step: int = 0
    start: int = 1

    def run_id(self, tracker: str, create: Callable[[], str]) -> str:
        """Return the run's id at a tracker; the first start creates and stores it."""
        path = self.run_dir / tracker / "run_id"
        run_id = path.read_text().strip() if path.exists() else ""
        if not run_id:
            run_id = create()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(run_id + "\n")
        return run_id


class Writer(abc.ABC):
    """Writes the lines of a run to one tracker. Methods may block or raise anything."""

    name: str  # names the tracker, its pip extra, and its folder in the run

    def __init__(self, run: TrackedRun, config: Any = None):
        self._run = run
        self._config = config

    @abc.abstractmethod
    def open(self, folder: Path, marked: int) -> int:
        """Begin or continue the run at the tracker.

        Args:
            folder: a local folder for files.
            marked: the step up to which earlier starts have written all lines, or -1.

        Returns:
            The step after which the tracker needs lines.
        """

    @abc.abstractmethod
    def write(self, lines: Sequence[Line]) -> None:
        """Write lines in ascending order of steps; several lines may share a step."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the tracker's run for this start, after storing all written lines."""
