"""A run that `python -m launch` starts and restarts, as its user sees it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.drills.run import Run
from tests.fleet import REPOSITORY, TINY, Fleet, of_text, write_text
from tests.program import module_option

STEPS = 600
TIMEOUT_S = 1200  # long enough for a machine that is four times slower
NOTHING: Mapping[str, str] = MappingProxyType({})


def launch(
    folder: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str] = NOTHING,
    stderr: int = subprocess.STDOUT,
) -> subprocess.Popen[str]:
    """Start `python -m launch` in a folder."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    env |= {"XDG_CACHE_HOME": f"{folder}/cache", **environment}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    env.pop("XLA_FLAGS", None)
    return subprocess.Popen(
        [sys.executable, *module_option("launch"), *arguments],
        env=env,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


def says(
    folder: Path,
    arguments: Sequence[str],
    code: int = 0,
    environment: Mapping[str, str] = NOTHING,
) -> str:
    """Run `python -m launch` to its end, and return its output."""
    process = launch(folder, arguments, environment)
    output = process.communicate(timeout=TIMEOUT_S)[0]
    assert process.returncode == code, output
    return output


class LaunchedRun:
    """One run in its own folder."""

    def __init__(
        self,
        folder: Path,
        *kind: str,
        name: str = "base",
        num_steps: int = STEPS,
        environment: Mapping[str, str] = NOTHING,
    ):
        """Describe the run without starting anything.

        Args:
            folder: The working directory of the commands.
            kind: The keys of the cluster.
            name: The name of the run.
            num_steps: The length of the run. It must outlast the commands, each of
                which takes seconds.
            environment: Additional environment variables of the commands.
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

    def says(self, arguments: Sequence[str], code: int = 0) -> str:
        return says(self.folder, arguments, code, self._environment)

    def submit(self, overrides: Sequence[str] = ()) -> str:
        return self.says([*self.arguments, *overrides])

    def verb(self, action: str, *more: str) -> str:
        return self.says([f"action={action}", self.only, *more])

    def submission(self, number: int) -> Path:
        return self.run.path / f"launch/{number}"

    def kill_supervisor(self, number: int) -> None:
        """Kill the supervisor of a submission, as if its machine went down."""
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
        results = self.run.path / "results.json"
        self.await_that(lambda: self.run.step >= first + more or results.exists())
        assert self.run.step >= first + more, "it ended first: give it more num_steps"

    def await_attempts(self, attempts: int = 1, number: int = 1) -> dict[str, Any]:
        """Wait until n attempts of a submission have ended, and return the last."""
        file = self.submission(number) / "attempts.jsonl"
        self.await_that(
            lambda: file.exists() and file.read_text().count("\n") >= attempts
        )
        return json.loads(file.read_text().splitlines()[attempts - 1])

    def processes(self, variable: str = "RANK") -> dict[int, int]:
        """Return the process ids of the training processes by rank.

        The variable holds the rank.
        """
        pids = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            is_training = words[2:4] == module_option("train")
            if is_training and f'run.dir="{self.run.path}"' in words:
                ranks = [v for v in variables if v.startswith(f"{variable}=")]
                pids[int([*ranks, "=0"][0].partition("=")[2])] = int(entry.name)
        return pids

    def straight(self, count: int) -> Run:
        """Run the same training undisturbed, with n processes and no launcher."""
        folder = self.folder.parent / "straight"
        folder.mkdir(exist_ok=True)
        run = Run(folder / "run", (), {})
        variables = {"XDG_CACHE_HOME": f"{folder}/cache"}
        # This run compiles like the launched one.
        variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
        words = (*self._training, *of_text(write_text(folder)), f"run.dir={run.path}")
        fleet = Fleet(folder / "logs", words, count, environment=variables)
        assert fleet.wait(TIMEOUT_S) == [0] * count, fleet.said()
        return run
