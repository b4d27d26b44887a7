"""Run commands of this program, and other programs, as processes of this machine."""

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.program import ROOT, command_words
from launch.policy import LAST_SAVE_S
from train.errors import CRASHED, WRONG_CONFIG, Exit

log = logging.getLogger(__name__)

QUERY_TIMEOUT_S = 120.0  # short, because one host that hangs delays all others
COMMAND_TIMEOUT_S = 1800.0  # for commands that copy code or create machines
_POLL_S = 0.05


def run_module(
    module: str,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a command of this program with `variables` added to the environment."""
    env = {**os.environ, **(variables or {}), "PYTHONPATH": str(ROOT)}
    command = [*command_words(module), *arguments]
    return subprocess.run(command, env=env, text=True, **options)


def run_tool(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a tool such as kubectl; return the completed process, with output as text.

    Raises:
        Exit: the program is not installed.
    """
    options = {"capture_output": True, "text": True, **options}
    try:
        return subprocess.run(words, **options)
    except FileNotFoundError:
        raise _not_installed_error(words[0], CRASHED) from None


def ask_tool(words: Sequence[str], **options: Any) -> str:
    """Run a tool that must succeed; return its output, or "" if not captured.

    Raises:
        Exit: the command failed, or the program is not installed.
    """
    result = run_tool(words, **options)
    if result.returncode:
        why = (result.stderr or "").strip() or f"exit code {result.returncode}"
        raise Exit(CRASHED, f"{shlex.join(words)} failed: {why}")
    return result.stdout or ""


def _not_installed_error(program: str, code: int) -> Exit:
    message = f"{program} is not installed on this machine, or not on the PATH"
    return Exit(code, message)


def run_captured(
    words: Sequence[str],
    timeout_s: float = COMMAND_TIMEOUT_S,
    cwd: Path | None = None,
    stdin: bytes = b"",
) -> tuple[int, bytes, str]:
    """Run a command; return its exit code, its output and its error output.

    The command runs in a separate session, so that Ctrl-C does not reach it. After
    `timeout_s` seconds, the command and its children are killed. Then the exit code is
    1, and the output contains the complete lines that were printed until then.

    Raises:
        Exit: the program is not installed.
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
        raise _not_installed_error(words[0], WRONG_CONFIG) from None
    with process:
        try:
            out, err = process.communicate(stdin, timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            out = error.stdout or b""
            message = f"{words[0]} took longer than {timeout_s:.0f} s"
            return 1, out[: out.rfind(b"\n") + 1], message
    return process.returncode, out, err.decode(errors="replace")


def torchrun_variables(
    local_rank: int, processes: int, node_rank: int = 0
) -> dict[str, str]:
    """Return torchrun's rank variables; none if each node has only one process."""
    if processes == 1:
        return {}
    ranks = {"RANK": node_rank * processes + local_rank, "LOCAL_RANK": local_rank}
    ranks |= {"LOCAL_WORLD_SIZE": processes}
    return {name: str(number) for name, number in ranks.items()}


class ProcessGroup:
    """The processes of one run. Signals may arrive while processes are started."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self.processes: list[subprocess.Popen[Any]] = []

    def add(self, command: Sequence[str], **options: Any) -> None:
        """Start another process; `options` are those of `subprocess.Popen`."""
        self.processes.append(subprocess.Popen(command, **options))
        if self._signal is not None:  # the signal arrived during the starts
            self.processes[-1].send_signal(self._signal)

    def wait(self, on_poll: Callable[[], object] = lambda: None) -> list[int | None]:
        """Wait for all processes; return their exit codes as a shell reports them.

        `on_poll` is called at each poll. All processes that still run LAST_SAVE_S
        seconds after the first one has ended are killed.
        """
        grace_left_s = LAST_SAVE_S
        while None in (codes := [process.poll() for process in self.processes]):
            on_poll()
            if any(code is not None for code in codes):
                grace_left_s -= _POLL_S
                if grace_left_s < 0 and self._signal != signal.SIGKILL:
                    log.warning("some processes do not end, so they are killed")
                    self.send_signal(signal.SIGKILL)
            time.sleep(_POLL_S)
        on_poll()
        codes = [process.returncode for process in self.processes]
        return [128 - code if code < 0 else code for code in codes]

    def send_signal(self, number: int) -> None:
        """Send a signal to all running processes, and to those added later."""
        self._signal = number
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)
