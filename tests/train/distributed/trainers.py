"""Short trainers, each with its watchdog, for the tests of watchdogs."""

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
    """A trainer process and its watchdog."""

    def __init__(self, popen: subprocess.Popen[str]):
        self.popen = popen
        assert popen.stdout
        self.watcher = int(popen.stdout.readline() or 0)

    def end(self) -> tuple[int, str]:
        """Wait until the trainer and its watcher end, as both hold the same stderr."""
        _, stderr = self.popen.communicate(timeout=60)
        return self.popen.returncode, stderr


Start = Callable[..., Trainer]


def stacks_in(folder: Path) -> str:
    (file,) = (folder / "stacks").glob("*-process0.txt")
    return file.read_text()
