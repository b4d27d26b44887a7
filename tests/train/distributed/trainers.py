"""Trainers of a few lines, each with its watchdog: what tests of those share."""

import subprocess
from collections.abc import Callable
from pathlib import Path

SETUP = """
import os, re, signal, sys, threading, time
from etils import epath
from train.config import WatchdogConfig
from train.distributed.watchdog import Watchdog

folder, process, processes = epath.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = WatchdogConfig(step_timeout_s=1.5, **eval(sys.argv[4]))
watchdog = Watchdog(config, folder, process, processes)
print(watchdog._child.pid if config.enabled else 0, flush=True)
"""


class Trainer:
    """A trainer that runs, and what it said."""

    def __init__(self, popen: subprocess.Popen[str]):
        self.popen = popen
        assert popen.stdout
        self.watcher = int(popen.stdout.readline() or 0)

    def end(self) -> tuple[int, str]:
        """Wait for its end and its watcher's: they hold the same stderr."""
        _, said = self.popen.communicate(timeout=60)
        return self.popen.returncode, said


Start = Callable[..., Trainer]


def stacks_in(folder: Path) -> str:
    (file,) = (folder / "stacks").glob("*-process0.txt")
    return file.read_text()
