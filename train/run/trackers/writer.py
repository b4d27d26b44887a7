"""The interface to a tracker's library, used on a thread of `train/run/tracker.py`."""

import abc
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

Line = tuple[int, Mapping[str, float]]  # completed updates, and their values


@dataclass(frozen=True)
class Tracked:
    """The start of a run that is tracked.

    step: completed updates of the restored state.
    start: the number of the start, from 1.
    """

    run_dir: epath.Path
    name: str
    config: dict[str, Any]
    step: int
    start: int

    def read_id(self, tracker: str) -> str:
        """Return the run's id at a tracker; empty if it has none yet."""
        path = self.run_dir / tracker / "run_id"
        return path.read_text().strip() if path.exists() else ""

    def write_id(self, tracker: str, run_id: str) -> None:
        """Keep the run's id at a tracker."""
        path = self.run_dir / tracker / "run_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(run_id + "\n")

    def drawn_id(self, tracker: str) -> str:
        """Return the run's id at a tracker, drawing it at the first start."""
        run_id = self.read_id(tracker)
        if not run_id:
            run_id = secrets.token_hex(4)
            self.write_id(tracker, run_id)
        return run_id


class Writer(abc.ABC):
    """Writes the lines of a run to one tracker. May block, and raise anything."""

    name: str  # names the tracker, its extra, and its folder in the run's directory

    @abc.abstractmethod
    def open(self, folder: Path, marked: int) -> int:
        """Begin or continue the run at the tracker.

        Args:
            folder: a local folder for files.
            marked: earlier starts have written all lines up to this step.

        Returns:
            The step after which the tracker needs lines.
        """

    @abc.abstractmethod
    def write(self, lines: Sequence[Line]) -> None:
        """Write lines, in ascending steps; several may be of one step."""

    @abc.abstractmethod
    def close(self) -> None:
        """Store the lines that were written."""
