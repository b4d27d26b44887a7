"""Processes of this machine: other commands of this program, and other programs."""

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.policy import OTHERS_S
from train.errors import CRASHED, WRONG_CONFIG, Exit

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]  # the folder of this program's packages
ASK_S = 120.0  # how long one host that hangs may hold up the others
LONGEST_S = 1800.0  # for what copies code, or makes machines
_POLL_S = 0.05


def run_module(
    module: str,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m <module> <arguments>`, from the same files as this process.

    It has `variables` in addition to those of this process.
    """
    env = {**os.environ, **(variables or {}), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.run(command, env=env, text=True, **options)


def run_tool(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a program of a cluster; return what it did, its outputs as text.

    Raises:
        Exit: there is no such program.
    """
    options = {"capture_output": True, "text": True, **options}
    try:
        return subprocess.run(words, **options)
    except FileNotFoundError:
        raise _missing(words[0], CRASHED) from None


def ask_tool(words: Sequence[str], **options: Any) -> str:
    """Run a program of a cluster, which must succeed; return its output, if captured.

    Raises:
        Exit: it failed, or there is no such program.
    """
    done = run_tool(words, **options)
    if done.returncode:
        why = (done.stderr or "").strip() or f"exit code {done.returncode}"
        raise Exit(CRASHED, f"{shlex.join(words)} failed: {why}")
    return done.stdout or ""


def _missing(program: str, code: int) -> Exit:
    message = f"{program} is not installed on this machine, or not on the PATH"
    return Exit(code, message)


def run_captured(
    words: Sequence[str],
    timeout_s: float = LONGEST_S,
    cwd: Path | None = None,
    stdin: bytes = b"",
) -> tuple[int, bytes, str]:
    """Run a command; return its exit code, its output and its error output.

    It has a session of its own, so that Ctrl-C does not reach it. After `timeout_s` it
    is killed with all that it started; the whole lines that it had written by then are
    returned.

    Raises:
        Exit: there is no such program.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            words,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=cwd,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise _missing(words[0], WRONG_CONFIG) from None
    with process:
        try:
            out, err = process.communicate(stdin, timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            out = error.stdout or b""
            late = f"{words[0]} took longer than {timeout_s:.0f} s"
            return 1, out[: out.rfind(b"\n") + 1], late
    return process.returncode, out, err.decode(errors="replace")


def torchrun_variables(local: int, processes: int, node: int = 0) -> dict[str, str]:
    """Return torchrun's variables of a process of this node; none for one alone."""
    if processes == 1:
        return {}
    numbers = {"RANK": node * processes + local, "LOCAL_RANK": local}
    numbers |= {"LOCAL_WORLD_SIZE": processes}
    return {name: str(number) for name, number in numbers.items()}


class ProcessGroup:
    """Processes that are one run; signals may come while more are being started."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self.processes: list[subprocess.Popen[Any]] = []

    def add(self, command: Sequence[str], **options: Any) -> None:
        """Start one more; `options` are those of `subprocess.Popen`."""
        self.processes.append(subprocess.Popen(command, **options))
        if self._signal is not None:  # it came while they were started
            self.processes[-1].send_signal(self._signal)

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> list[int | None]:
        """Wait for all, calling `meanwhile` often; return exit codes as a shell does.

        The rest is killed long after the first has ended.
        """
        patience_s = OTHERS_S
        while None in (codes := [process.poll() for process in self.processes]):
            meanwhile()
            if any(code is not None for code in codes):
                patience_s -= _POLL_S
                if patience_s < 0:
                    log.warning("some do not end after another has: killed")
                    self.send_signal(signal.SIGKILL)
            time.sleep(_POLL_S)
        meanwhile()
        codes = [process.returncode for process in self.processes]
        return [128 - code if code < 0 else code for code in codes]

    def send_signal(self, number: int) -> None:
        """Send a signal to all that live, and to those to come."""
        self._signal = number
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)
