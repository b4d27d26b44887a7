"""`run.sh`: trains on a host, apart from the connection that asked for it.

It lies in a folder of the host's own, with what it knows of each process:

    process-<n>/lock    held as long as anything of it lives
    process-<n>/pid     of training, or of what is set up before
    process-<n>/code    its exit code, as a shell has it; there only when it has ended
    process-<n>/log     what the last start said

A process has a session of its own, by setsid --fork and not `&`, with which a shell has
its children ignore SIGINT. All verbs end with 0: what counts is what they print.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from launch.job import exports, shell

RUN = "run.sh"


class State(NamedTuple):
    """The state of a process: `running`, `ended` with a code, or `lost` without one.

    `told` says whether it received the signal.
    """

    word: str
    code: int | None = None


def remote_folder(name: str) -> str:
    """Return the folder on the host, from the user's home on."""
    return f"longhaul/{name}"


def run_script(
    command: Sequence[str],
    environment: Mapping[str, str],
    secrets: Sequence[str] = (),
    setup: Sequence[str] = (),
    workdir: str | None = None,
    last: Sequence[str] = (),
) -> str:
    """Return the text of run.sh.

    Args:
        command: the words that train.
        environment: variables.
        secrets: lines of shell that fetch others, and fail where they cannot.
        setup: lines of shell, in the same shell as the command.
        workdir: where it runs; None: in the folder of run.sh.
        last: lines of shell right before the command.
    """
    change_folder = [] if workdir is None else [f"cd -- {shlex.quote(workdir)}"]
    body = [*exports(environment), *secrets, *setup, *change_folder, *last]
    body.append(f"exec {shell(command)}")
    template = Path(__file__).with_name(RUN).read_text()
    return template.replace("@BODY@", "\n".join(body))


def run_words(name: str, verb: str, words: Sequence[str | int]) -> str:
    """Return the command that a shell of the host is told."""
    return shell(["bash", f"{remote_folder(name)}/{RUN}", verb, *map(str, words)])


def read_states(output: str) -> dict[str, State]:
    """Read what run.sh said of its processes, by `host:process`."""
    pattern = r"^longhaul (\S+) (running|ended|lost|told) ?(\d*)\r?$"
    return {
        name: State(word, int(code) if code else None)
        for name, word, code in re.findall(pattern, output, re.MULTILINE)
    }
