"""The program of a node, for clusters that start one program on each node.

    python -m launch.node [--processes 8] [--folder DIR ...] -- command...

It starts the command, or several that share the node's GPUs, with torchrun's variables,
passes signals on, and ends with the most telling exit code (launch/policy.py). With a
folder it also asks the run to save and stop for good when the folder has a file `stop`,
and counts the node's crashes there: after one that may be retried it ends with ABORTED,
so that the cluster starts it again.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from etils import epath

from launch.policy import Verdict, judge, pause_after_crash
from launch.subprocesses import ProcessGroup, torchrun_variables
from train.errors import ABORTED, STOPPED

STOP = "stop"
_LOOK_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def node_command(
    python: str,
    processes: int = 1,
    folder: str | None = None,
    max_restarts: int = 0,
    backoff_s: float = 0,
) -> list[str]:
    """Return the words to put in front of the command."""
    words = [python, "-P", "-m", "launch.node", "--processes", str(processes)]
    if folder is not None:
        counted = ["--max-restarts", str(max_restarts), "--backoff", str(backoff_s)]
        words += ["--folder", folder, *counted]
    return [*words, "--"]


def main(arguments: Sequence[str]) -> int:
    """Run the processes to their end; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch.node")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--folder", type=epath.Path)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--backoff", type=float, default=0)
    parser.add_argument("--look", type=float, default=_LOOK_S)
    command = list(arguments)
    split = command.index("--")
    options = parser.parse_args(command[:split])
    rank = int(os.environ.get("NODE_RANK", "0"))
    if asked_to_stop(options.folder):
        return STOPPED
    processes = ProcessGroup()
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: processes.send_signal(number))
    for local in range(options.processes):
        env = {**os.environ, **torchrun_variables(local, options.processes, rank)}
        processes.add(command[split + 1 :], env=env)
    if options.folder is not None and rank == 0:
        looking = processes, options.folder, options.look
        threading.Thread(target=_stop_if_asked, args=looking, daemon=True).start()
    verdict, code = judge(processes.wait())
    # Nothing is left to pass them on to. Python keeps what is ignored to its very end.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if verdict is not Verdict.crashed or options.folder is None:
        return code
    return _counted(code, options.folder / f"crashes-{rank}", options)


def asked_to_stop(folder: epath.Path | None) -> bool:
    """Return whether a submission's folder holds `stop`; no while it cannot be read."""
    try:
        return folder is not None and (folder / STOP).exists()
    except Exception as error:  # each store has its own; it may be away for a while
        print(f"cannot look into {folder}: {error}", file=sys.stderr)
        return False


def _counted(code: int, count: epath.Path, options: argparse.Namespace) -> int:
    """Count a crash; return the code that has the node started again, or not."""
    crashes = 1 + int(count.read_text() if count.exists() else 0)
    count.write_text(str(crashes))
    pause_s = pause_after_crash(code, crashes, options.max_restarts, options.backoff)
    if pause_s is None:
        return code
    time.sleep(pause_s)
    return ABORTED


def _stop_if_asked(processes: ProcessGroup, folder: epath.Path, look_s: float) -> None:
    """Wait until a person asks to stop; pass that on as Ctrl-C, once."""
    while not asked_to_stop(folder):
        time.sleep(look_s)
    processes.send_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
