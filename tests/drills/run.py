"""A run that is drilled: its starts, and what lies in its directory."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tests.fleet import Fleet


class Run:
    """A run directory and the starts of it."""

    def __init__(self, path: Path, overrides: Sequence[str], environment: dict):
        """Name it; nothing is made."""
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
        **others: Any,
    ) -> Fleet:
        """Start its processes with more overrides; the rest is `Fleet`'s."""
        overrides = [*self.overrides, f"run.dir={self.path}", *more]
        both = {**self._environment, **(environment or {})}
        return Fleet(self._logs(), overrides, count, environment=both, **others)

    def other(self, door: str, *overrides: str) -> Fleet:
        """Start another command."""
        environment = self._environment
        return Fleet(self._logs(), overrides, module=door, environment=environment)

    def _logs(self) -> Path:
        self._starts += 1
        return self._place / f"{self._name}.{self._starts}"

    def finish(self, *more: str, count: int = 1, **others: Any) -> Fleet:
        """Start it and let it come to its end."""
        fleet = self.start(*more, count=count, **others)
        codes = fleet.wait(600)
        assert codes == [0] * count, f"exit codes {codes}: {fleet.said()[-2000:]}"
        return fleet

    def rows(self, log: str) -> list[dict[str, Any]]:
        """Read metrics or events; a line that is being written is left out."""
        file = self.path / f"{log}.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def losses(self) -> dict[int, float]:
        """Give the loss of each step, in the order of the lines, each there once."""
        rows = [row for row in self.rows("metrics") if "loss" in row]
        steps = [row["step"] for row in rows]
        assert len(steps) == len(set(steps)), f"steps with several lines: {steps}"
        return {row["step"]: row["loss"] for row in rows}

    @property
    def step(self) -> int:
        """The last step with a line."""
        return max(self.losses(), default=0)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Give the events of a name."""
        return [row for row in self.rows("events") if row["event"] == name]

    @property
    def results(self) -> bool:
        """Whether it is finished."""
        return (self.path / "results.json").exists()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def steps(self) -> list[int]:
        """List the steps there are, sealed or not."""
        names = _names(self.checkpoints)
        return sorted(int(name) for name in names if name.isdigit())

    def sealed(self) -> list[int]:
        """List the steps that are sealed."""
        return [s for s in self.steps() if (self.folder(s) / "digests.json").exists()]

    def folder(self, step: int) -> Path:
        """Name the folder of a checkpoint."""
        return self.checkpoints / str(step)

    def aside(self) -> list[int]:
        """List the steps that were set aside."""
        names = _names(self.checkpoints / "quarantine")
        return sorted(int(name.split("-")[0]) for name in names)

    def leftovers(self) -> list[str]:
        """List what dead saves left."""
        names = [n for n in _names(self.checkpoints) if "tmp" in n or n[0] == "."]
        return names + [f"unsealed/{n}" for n in _names(self.checkpoints / "unsealed")]

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        """Read all arrays of a checkpoint."""
        file = {"driver": "file", "path": f"{self.folder(step)}/state/"}
        base = {"driver": "ocdbt", "base": file}
        keys = ts.KvStore.open(base).result().list().result()
        found = (key.decode().partition("/zarr.json") for key in keys)
        return {name: _read(base, name) for name, is_array, _ in found if is_array}

    def phase_at(self, moment: float) -> str:
        """Say what the last start did at a moment (time.time()), by its events."""
        rows = self.rows("events")
        laps = [r for r in rows if r["start"] == rows[-1]["start"] and r["seconds"]]
        before = [lap["event"] for lap in laps if lap["time"] < moment]
        during = next((lap["event"] for lap in laps if lap["time"] >= moment), "close")
        if during == "prepare" and "restore" in before:
            return "compile"
        if during == "close":  # it ended in the midst of what comes next
            order = ("start", "init", "prepare", "restore", "compile")
            return next((phase for phase in order if phase not in before), "step")
        return during


def until(holds: Callable[[], bool], timeout_s: float = 180) -> None:
    """Wait until something holds, looking a thousand times a second."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.001)


def _read(base: dict[str, Any], name: str) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {**base, "path": f"{name}/"}}
    return ts.open(spec, read=True).result().read().result()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
