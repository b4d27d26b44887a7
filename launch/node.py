"""What runs on a node, where a cluster starts one program on each.

    python -m launch.node [--processes 8] [--folder DIR ...] -- command...

Starts the command, or as many of it as share the node's GPUs, with torchrun's
variables; passes signals on, and ends with the exit code that says most
(launch/policy.py). With a folder it does what its cluster cannot:

- it asks the run to save and stop, for good, once the folder has a file `stop`;
- it counts the node's crashes there. After one that is not the last it ends with
  ABORTED, which such a cluster is told to start again; else with the crash's own code.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from etils import epath

from launch.policy import Verdict, backoff, judge
from launch.processes import Processes, place
from train.errors import ABORTED, STOPPED

STOP = "stop"
_LOOK_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def through(
    python: str,
    processes: int = 1,
    folder: str | None = None,
    max_restarts: int = 0,
    backoff_s: float = 0,
) -> list[str]:
    """Give the words to put in front of the command."""
    words = [python, "-P", "-m", "launch.node", "--processes", str(processes)]
    if folder is not None:
        counted = ["--max-restarts", str(max_restarts), "--backoff", str(backoff_s)]
        words += ["--folder", folder, *counted]
    return [*words, "--"]


def main(arguments: Sequence[str]) -> int:
    """Run the processes to their end; give the exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch.node")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--folder", type=epath.Path)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--backoff", type=float, default=0)
    parser.add_argument("--look", type=float, default=_LOOK_S)
    own = list(arguments)
    split = own.index("--")
    told = parser.parse_args(own[:split])
    rank = int(os.environ.get("NODE_RANK", "0"))
    if _asked(told.folder):
        return STOPPED
    processes = Processes()
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: processes.tell(number))
    for local in range(told.processes):
        env = {**os.environ, **place(local, told.processes, rank)}
        processes.add(own[split + 1 :], env=env)
    if told.folder is not None and rank == 0:
        looking = processes, told.folder, told.look
        threading.Thread(target=_stop_if_asked, args=looking, daemon=True).start()
    verdict, code = judge(processes.wait())
    if verdict is not Verdict.crashed or told.folder is None:
        return code
    return _counted(code, told.folder / f"crashes-{rank}", told)


def _asked(folder: epath.Path | None) -> bool:
    try:
        return folder is not None and (folder / STOP).exists()
    except Exception as error:  # each store has its own; it may be away for a while
        print(f"cannot look into {folder}: {error}", file=sys.stderr)
        return False


def _counted(code: int, count: epath.Path, told: argparse.Namespace) -> int:
    """Count a crash; give the code that has the node started again, or not."""
    crashes = 1 + int(count.read_text() if count.exists() else 0)
    count.write_text(str(crashes))
    if crashes > told.max_restarts:
        limit = f"cluster.max_restarts={told.max_restarts}"
        print(f"crashed with {code}; that is once more than {limit}", file=sys.stderr)
        return code
    pause_s = backoff(crashes, told.backoff)
    said = f"crashed with {code} ({crashes} of {told.max_restarts})"
    print(f"{said}; again in {pause_s:.0f} s", file=sys.stderr)
    time.sleep(pause_s)
    return ABORTED


def _stop_if_asked(processes: Processes, folder: epath.Path, look_s: float) -> None:
    """Look whether a person asks to stop, and pass that on as Ctrl-C, once."""
    while not _asked(folder):
        time.sleep(look_s)
    processes.tell(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
