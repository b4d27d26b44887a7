"""Render `run.sh`, which trains on a host independently of the ssh connection.

The script is in a local folder of the host, with files about each process:

    process-<n>/lock    locked while the process or one of its children lives
    process-<n>/group   the id of the process group, to kill all of it
    process-<n>/pid     the id of the training process, or of the setup before it
    process-<n>/code    the exit code, as a shell reports it, once the process has ended
    process-<n>/log     the output of the last start

The script starts each process with `setsid --fork`, because a child that a shell starts
with `&` would ignore SIGINT. The script is called as `run.sh <verb> ...`, and all verbs
exit with 0: only their output tells what happened.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from launch.job import export_lines, shell
from launch.job_secret import SECRET_FILE, SECRET_VARIABLE

RUN = "run.sh"


class State(NamedTuple):
    """The state of a process: `running`, `ended` with a code, or `lost` without one.

    The verb `signal` reports `told` for a process that received the signal.
    """

    word: str
    code: int | None = None


def remote_folder(name: str) -> str:
    """Return the run's folder on a host, relative to the user's home."""
    return f"longhaul/{name}"


def run_script(
    command: Sequence[str],
    environment: Mapping[str, str],
    secrets: Sequence[str] = (),
    setup: Sequence[str] = (),
    workdir: str | None = None,
    last_lines: Sequence[str] = (),
) -> str:
    """Return the text of run.sh.

    Args:
        command: the words of the training command.
        environment: variables to export.
        secrets: lines of shell that export secret variables, or fail.
        setup: lines of shell, which run in the same shell as the command.
        workdir: the working directory, None for the folder of run.sh.
        last_lines: lines of shell right before the command.
    """
    change_folder = [] if workdir is None else [f"cd -- {shlex.quote(workdir)}"]
    body = [*export_lines(environment), *secrets, *setup, *change_folder, *last_lines]
    body.append(f"exec {shell(command)}")
    template = Path(__file__).with_name(RUN).read_text()
    template = template.replace("@SECRET_FILE@", SECRET_FILE)
    template = template.replace("@SECRET_VARIABLE@", SECRET_VARIABLE)
    return template.replace("@BODY@", "\n".join(body))


def verb_line(name: str, verb: str, words: Sequence[str | int]) -> str:
    """Return the line of shell that runs a verb of run.sh on a host."""
    return shell(["bash", f"{remote_folder(name)}/{RUN}", verb, *map(str, words)])


def read_states(output: str) -> dict[str, State]:
    """Return the states in the output of run.sh, by `host:process`."""
    pattern = r"^longhaul (\S+) (running|ended|lost|told) ?(\d*)\r?$"
    return {
        name: State(word, int(code) if code else None)
        for name, word, code in re.findall(pattern, output, re.MULTILINE)
    }
