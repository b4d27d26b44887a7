"""A run that `python -m launch` keeps going somewhere, as its user sees it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.drills.run import Run
from tests.fleet import REPOSITORY, TINY, Fleet, of_text, write_text

STEPS = 600
TIMEOUT_S = 1200  # a machine that is four times slower passes too
NOTHING: Mapping[str, str] = MappingProxyType({})


def launch(
    folder: Path, *arguments: str, environment: Mapping[str, str] = NOTHING
) -> subprocess.Popen[str]:
    """Start `python -m launch` in a folder."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    env |= {"XDG_CACHE_HOME": f"{folder}/cache", **environment}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    env.pop("XLA_FLAGS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "launch", *arguments],
        env=env,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def says(
    folder: Path, *arguments: str, code: int = 0, environment: Mapping = NOTHING
) -> str:
    """Run `python -m launch` to its end, and return what it said."""
    process = launch(folder, *arguments, environment=environment)
    said = process.communicate(timeout=TIMEOUT_S)[0]
    assert process.returncode == code, said
    return said


class LaunchedRun:
    """One run, in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *kind: str,
        name: str = "base",
        num_steps: int = STEPS,
        environment: Mapping[str, str] = NOTHING,
    ):
        """Describe it; nothing is started.

        Args:
            folder: where the commands are typed.
            kind: the keys of the cluster.
            name: of the run.
            num_steps: more than it does while commands are typed, which take seconds.
            environment: more of it, of the commands.
        """
        folder.mkdir(exist_ok=True)
        self.folder = write_text(folder)
        self.run = Run(folder / f"runs/{name}", (), {})
        self._training = (
            *(
                *TINY,
                f"train.num_steps={num_steps}",
                "checkpoint.save_interval_steps=20",
            ),
            *("mesh=ddp", "distributed.heartbeat_timeout_s=20"),
        )
        self.only = f"run.name={name}"
        self.arguments = (*kind, "cluster.backoff_s=0.1", *self._training, self.only)
        self.arguments += of_text(folder)
        self._environment = environment

    def says(self, *arguments: str, code: int = 0) -> str:
        return says(self.folder, *arguments, code=code, environment=self._environment)

    def submit(self, *more: str) -> str:
        return self.says(*self.arguments, *more)

    def verb(self, action: str, *more: str) -> str:
        return self.says(f"action={action}", self.only, *more)

    def submission(self, number: int) -> Path:
        return self.run.path / f"launch/{number}"

    def kill_supervisor(self, number: int) -> None:
        """Kill the process that keeps it going, as if its machine went down."""
        record = json.loads((self.submission(number) / "record.json").read_text())
        os.kill(record["handle"]["pid"], signal.SIGKILL)

    def await_that(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        files = self.run.path.glob("launch/*/*.log")
        return "\n".join(file.read_text(errors="replace")[-4000:] for file in files)

    def await_steps(self, more: int = 5) -> None:
        first = self.run.step
        ended = self.run.path / "results.json"
        self.await_that(lambda: self.run.step >= first + more or ended.exists())
        assert self.run.step >= first + more, "it ended first: give it more num_steps"

    def await_attempts(self, attempts: int = 1, number: int = 1) -> dict[str, Any]:
        """Wait until so many attempts of a submission have ended; return the last."""
        file = self.submission(number) / "attempts.jsonl"
        self.await_that(
            lambda: file.exists() and file.read_text().count("\n") >= attempts
        )
        return json.loads(file.read_text().splitlines()[attempts - 1])

    def processes(self, variable: str = "RANK") -> dict[int, int]:
        """Return the processes that train here, by the rank that a variable says."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            if words[3:4] == ["train"] and f'run.dir="{self.run.path}"' in words:
                ranks = [v for v in variables if v.startswith(f"{variable}=")]
                found[int([*ranks, "=0"][0].partition("=")[2])] = int(entry.name)
        return found

    def straight(self, count: int) -> Run:
        """Return the same run of so many processes, undisturbed, by no launcher."""
        folder = self.folder.parent / "straight"
        folder.mkdir(exist_ok=True)
        run = Run(folder / "run", (), {})
        own = {"XDG_CACHE_HOME": f"{folder}/cache"}
        own["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"  # compiled as what is launched
        there = (*self._training, *of_text(write_text(folder)), f"run.dir={run.path}")
        fleet = Fleet(folder / "logs", there, count, environment=own)
        assert fleet.wait(TIMEOUT_S) == [0] * count, fleet.said()
        return run
