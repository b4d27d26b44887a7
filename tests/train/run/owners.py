"""Run processes that own a folder and obey commands, and list its files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.program import program_code

NEVER_S = 1e6
CHILD = """
import logging, resource, sys
from train import liveness
from train.errors import Exit
from train.run.lease import take_lease

folder, interval_s, timeout_s, machine = sys.argv[1:]
if machine:
    liveness._machine = lambda: machine
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")

def say(line):  # in one write: two threads do
    print(f"{line}\\n", end="", flush=True)

lease = None
for command in iter(sys.stdin.readline, ""):
    try:
        match command.strip():
            case "take":
                lease = take_lease(
                    folder, float(interval_s), float(timeout_s),
                    lambda message: say(f"LOST {message}"),
                )
                say("taken")
            case "check":
                lease.check()
            case "close":
                lease.close()
            case "full" | "room" as disk:
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                soft = 0 if disk == "full" else hard
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            case "exit":
                sys.exit()
    except Exit as e:
        say(e)
        sys.exit(e.code)
    say(f"did {command.strip()}")
"""


class Process:
    """A process that executes the commands that it is sent, one at a time."""

    def __init__(self, folder: str | Path, *, machine: str, times: tuple[float, float]):
        arguments = [str(folder), *map(str, times), machine]
        self.popen = subprocess.Popen(
            [sys.executable, "-c", program_code(CHILD), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self.popen.pid
        self.taken: bool | None = None

    def tell(self, *commands: str) -> None:
        assert self.popen.stdin
        for command in commands:
            self.popen.stdin.write(f"{command}\n")

    def until(self, *texts: str) -> list[str]:
        """Return the output lines up to the first that contains one of the texts."""
        lines: list[str] = []
        assert self.popen.stdout
        for line in self.popen.stdout:
            lines.append(line)
            if any(text in line for text in texts):
                return lines
        raise AssertionError(f"none of {texts} in {lines}")

    def do(self, command: str) -> list[str]:
        self.tell(command)
        return self.until(f"did {command}")

    def send(self, number: int) -> None:
        """Send a signal that stops or continues the process, and wait for a stop."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            os.waitpid(self.pid, os.WUNTRACED)


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.02)


def files(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())
