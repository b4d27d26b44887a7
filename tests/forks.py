"""Start `python -m <command>` in forks of a process that has done its imports.

Importing is two thirds of a short start. Here one process imports the modules that
commands need, without initializing a device, and forks for each start. Each fork has
its own arguments, folder, environment, output, signals and exit code. A fork cannot
show what a command imports, or when.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.program import PREFIX

OUT = "forked.out"
ERR = "forked.err"
_IMPORTED = (
    "train.start",
    "train.plan.plan",
    "train.sample.generate",
    "train.run.tracker",
)


class Forks:
    """The process that forks.

    `environment` is that of all starts; JAX reads it when it is imported.
    """

    def __init__(self, environment: Mapping[str, str]):
        root = Path(__file__).parents[1]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        env = {**environment, "PYTHONPATH": str(root)}
        command = [sys.executable, "-P", __file__]
        self._server = subprocess.Popen(command, text=True, env=env, **pipes)

    def run(
        self, words: Sequence[str], folder: Path, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `python <words>` in a folder until it ends.

        Args:
            words: `-m <module>` or a file, and arguments.
            folder: the working folder, which also gets the output.
            more: further environment variables.
        """
        self.start(words, folder, more)
        code = self.wait()
        outputs = ((folder / name).read_text(errors="replace") for name in (OUT, ERR))
        return subprocess.CompletedProcess(words, code, *outputs)

    def start(
        self, words: Sequence[str], folder: Path, more: Mapping[str, str] | None = None
    ) -> int:
        """Start a process once the previous one has ended; return its process id.

        Its output is in the files OUT and ERR of the folder.
        """
        assert self._server.stdin is not None
        start = [list(words), str(folder), dict(more or {})]
        self._server.stdin.write(json.dumps(start) + "\n")
        self._server.stdin.flush()
        return self._read()

    def wait(self) -> int:
        """Wait until the process ends; return its exit code, negative for a signal."""
        return self._read()

    def _read(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def close(self) -> None:
        """End the process that forks."""
        self._server.communicate()


def _serve() -> None:
    for name in _IMPORTED:
        importlib.import_module(PREFIX + name)
    metrics: Any = importlib.import_module(f"{PREFIX}train.run.metrics")
    for line in sys.stdin:
        if (process := os.fork()) == 0:
            metrics._IMPORTED = time.monotonic()
            return _become(*json.loads(line))
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(words: list[str], folder: str, more: dict[str, str]) -> None:
    """Run the command in this fork, which ends when this function returns."""
    os.chdir(folder)
    os.environ.update(more)
    for number, file in enumerate((os.devnull, OUT, ERR)):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
