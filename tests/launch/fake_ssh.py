"""An `ssh` that runs commands on this machine, with a home folder for each host.

$FAKE_SSH/home/<host>/   the home of a host; its processes have FAKE_HOST=<host>
$FAKE_SSH/off/<host>     while this file exists, the host fails with its text
$FAKE_SSH/off/all        the same for all hosts
$FAKE_SSH/calls.jsonl    the arguments of each call
$FAKE_SSH/bin/           the folder that is first on the hosts' PATH
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    folder = Path(os.environ["FAKE_SSH"])
    with (folder / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(argv) + "\n")
    host, line = argv[argv.index("--") + 1 :]
    for file in (folder / "off" / host, folder / "off/all"):
        if not file.exists():
            continue
        why = file.read_text() or f"connect to host {host} port 22: No route to host"
        print(why, file=sys.stderr)
        return 255
    home = folder / "home" / host
    home.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "HOME": str(home), "FAKE_HOST": host}
    env["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
    env["BASH_ENV"] = str(home / ".bashrc")  # bash reads it if it exists
    return subprocess.run(["bash", "-c", line], cwd=home, env=env).returncode


def install(folder: Path) -> Path:
    """Make the folder, and return the one that must be first on the PATH."""
    from tests.launch.hostile import program  # the fake itself runs without packages

    for name in ("home", "off"):
        (folder / name).mkdir(parents=True)
    text = f'#!/bin/sh\nexec {sys.executable} -S {__file__} "$@"\n'
    program(folder / "path/ssh", text)
    return folder / "path"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
