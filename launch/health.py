"""Tests whether a command of this program runs in this container: its health check.

    python -P -m launch.health

Exit code 0 if one does, 1 if none does or one is stopped. Not whether it comes on: one
that does not is ended by its watchdog, and the container ends with it. For Linux.
"""

import sys
from pathlib import Path

from train.run.liveness import state_and_start

_COMMANDS = ("train", "data", "launch")
_STOPPED = ("T", "t")  # process states: stopped by a signal, by a debugger (proc(5))


def main() -> int:
    """Check all processes of the container."""
    states = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except (OSError, UnicodeDecodeError):  # gone, or none of ours
                continue
            state, _ = state_and_start(int(folder.name))
            if is_command(words) and state is not None:
                states[folder.name] = state
    stopped = [number for number, state in states.items() if state in _STOPPED]
    if stopped:
        print(f"stopped: process {', '.join(stopped)}")
    elif not states:
        print("no command of this program runs")
    return 0 if states and not stopped else 1


def is_command(words: list[str]) -> bool:
    """Return whether a command line is `python -m <one of ours>`, but for this one."""
    if "-m" not in words or not Path(words[0]).name.startswith("python"):
        return False
    module = "".join(words[words.index("-m") + 1 :][:1])
    return module.partition(".")[0] in _COMMANDS and module != "launch.health"


if __name__ == "__main__":
    sys.exit(main())
