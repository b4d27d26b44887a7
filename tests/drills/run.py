"""A run under drill: its starts, and the contents of its directory."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from data.program import PREFIX
from tests.fleet import Fleet

# Steps take a tenth of a second longer, so that a signal can hit a run of small steps.
# No one writes the file that would end this pace.
PACE = {"LONGHAUL_DRILL": "pace:0.1:never"}


class Run:
    """A run directory and its starts."""

    def __init__(self, path: Path, overrides: Sequence[str], environment: dict):
        """Name the run; no file is written."""
        self.path = path
        self.overrides = overrides
        self._place = path.parent
        self._name = path.name
        self._environment = environment
        self._starts = 0

    def start(
        self,
        *more: str,
        count: int = 1,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Fleet:
        """Start the processes with more overrides, at a slow pace if no fault is set.

        `Fleet` gets the `options`.
        """
        overrides = [*self.overrides, f"run.dir={self.path}", *more]
        variables = {**self._environment, **PACE, **(environment or {})}
        return Fleet(self._logs(), overrides, count, environment=variables, **options)

    def other(self, module: str, *overrides: str) -> Fleet:
        """Start another command of the project, given its module."""
        environment = self._environment
        return Fleet(
            self._logs(), overrides, module=PREFIX + module, environment=environment
        )

    def _logs(self) -> Path:
        self._starts += 1
        return self._place / f"{self._name}.{self._starts}"

    def finish(
        self,
        *more: str,
        count: int = 1,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Fleet:
        """Start the run, and wait until every process ends with 0."""
        variables = {"LONGHAUL_DRILL": "", **(environment or {})}
        fleet = self.start(*more, count=count, environment=variables, **options)
        codes = fleet.wait(600)
        assert codes == [0] * count, f"exit codes {codes}: {fleet.said()[-2000:]}"
        return fleet

    def rows(self, log: str) -> list[dict[str, Any]]:
        """Read metrics or events; an incomplete last line is skipped."""
        file = self.path / f"{log}.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def losses(self) -> dict[int, float]:
        """Return the loss of each step, in the order of the lines.

        Raises an AssertionError if a step has several lines.
        """
        rows = [row for row in self.rows("metrics") if "loss" in row]
        steps = [row["step"] for row in rows]
        assert len(steps) == len(set(steps)), f"steps with several lines: {steps}"
        return {row["step"]: row["loss"] for row in rows}

    @property
    def step(self) -> int:
        """The last step that has a line in the metrics."""
        return max(self.losses(), default=0)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events with this name."""
        return [row for row in self.rows("events") if row["event"] == name]

    @property
    def results(self) -> bool:
        """Whether the run is finished."""
        return (self.path / "results.json").exists()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def steps(self) -> list[int]:
        """List the steps of all checkpoints, sealed or not."""
        names = _names(self.checkpoints)
        return sorted(int(name) for name in names if name.isdigit())

    def sealed(self) -> list[int]:
        """List the steps of the sealed checkpoints."""
        return [s for s in self.steps() if (self.folder(s) / "digests.json").exists()]

    def folder(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.checkpoints / str(step)

    def aside(self) -> list[int]:
        """List the steps whose checkpoints were set aside."""
        names = _names(self.checkpoints / "quarantine")
        return sorted(int(name.split("-")[0]) for name in names)

    def leftovers(self) -> list[str]:
        """List the files that interrupted saves left."""
        names = [n for n in _names(self.checkpoints) if "tmp" in n or n[0] == "."]
        return names + [f"unsealed/{n}" for n in _names(self.checkpoints / "unsealed")]

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        """Read all arrays of a checkpoint."""
        file = {"driver": "file", "path": f"{self.folder(step)}/state/"}
        base = {"driver": "ocdbt", "base": file}
        keys = ts.KvStore.open(base).result().list().result()
        parts = (key.decode().partition("/zarr.json") for key in keys)
        return {name: _read(base, name) for name, is_array, _ in parts if is_array}

    def phase_at(self, moment: float) -> str:
        """Return the phase of the last start at a moment (`time.time()`).

        The phase is read from the events.
        """
        rows = self.rows("events")
        laps = [r for r in rows if r["start"] == rows[-1]["start"] and r["seconds"]]
        completed = [lap["event"] for lap in laps if lap["time"] < moment]
        current = next((lap["event"] for lap in laps if lap["time"] >= moment), "close")
        if current == "prepare" and "restore" in completed:
            return "compile"
        if current == "close":  # the start ended during the next phase
            order = ("start", "init", "prepare", "restore", "compile")
            return next((phase for phase in order if phase not in completed), "step")
        return current


def until(holds: Callable[[], bool], timeout_s: float = 180) -> None:
    """Wait until a condition holds, and test it a thousand times a second."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.001)


def _read(base: dict[str, Any], name: str) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {**base, "path": f"{name}/"}}
    return ts.open(spec, read=True).result().read().result()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
