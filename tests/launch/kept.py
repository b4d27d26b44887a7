"""A run that `python -m launch` keeps going on other machines, as its user sees it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.drills.run import Run
from tests.fleet import REPOSITORY, TINY, Fleet, of_text, write_text

STEPS = 600
TIMEOUT_S = 300


class Kept:
    """One run, `base`, in a folder of its own."""

    def __init__(
        self, folder: Path, kind: Sequence[str], environment: Mapping[str, str]
    ):
        """Describe it; nothing is started.

        Args:
            folder: where the commands are typed.
            kind: the keys of the cluster.
            environment: more of it, of the commands.
        """
        self.folder, self.run = write_text(folder), Run(folder / "runs/base", (), {})
        self.own = (
            *(*TINY, *of_text(folder)),
            *(f"train.num_steps={STEPS}", "checkpoint.save_interval_steps=20"),
            *("mesh=ddp", "distributed.heartbeat_timeout_s=5"),
        )
        self.arguments = (*kind, "cluster.detach=true", "cluster.backoff_s=0.1")
        self.arguments += (*self.own, "run.name=base")
        self._env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self._env |= {"XDG_CACHE_HOME": f"{folder}/cache", "JAX_PLATFORMS": "cpu"}
        self._env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **environment}
        self._env.pop("XLA_FLAGS", None)

    def says(self, *arguments: str, code: int = 0) -> str:
        """Run `python -m launch` to its end, and give what it said."""
        done = subprocess.run(
            [sys.executable, "-m", "launch", *arguments],
            env=self._env,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def submit(self) -> str:
        return self.says(*self.arguments)

    def verb(self, action: str, *more: str) -> str:
        return self.says(f"action={action}", "run.name=base", *more)

    def submission(self, number: int) -> Path:
        return self.run.path / f"launch/{number}"

    def watcher(self, number: int) -> int:
        """Give the process that keeps it going."""
        submission = json.loads((self.submission(number) / "record.json").read_text())
        return submission["handle"]["pid"]

    def await_that(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            logs = [p.read_text() for p in self.run.path.glob("launch/*/*.log")]
            assert time.monotonic() < deadline, "\n".join(log[-4000:] for log in logs)
            time.sleep(0.05)

    def await_steps(self, more: int = 5) -> None:
        first = self.run.step
        self.await_that(lambda: self.run.step >= first + more)

    def await_attempts(self, number: int, attempts: int = 1) -> None:
        """Wait until so many attempts of a submission have ended."""
        file = self.submission(number) / "attempts.jsonl"
        self.await_that(
            lambda: file.exists() and file.read_text().count("\n") >= attempts
        )

    def straight(self, count: int) -> Run:
        """Give the same run of so many processes, undisturbed, by no launcher."""
        run = Run(self.folder / "straight", (), {})
        own = {"XDG_CACHE_HOME": f"{self.folder}/cache"}
        there = (*self.own, f"run.dir={run.path}")
        fleet = Fleet(self.folder / "logs", there, count, environment=own)
        assert fleet.wait(TIMEOUT_S) == [0] * count, fleet.said()
        return run
