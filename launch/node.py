"""Run the processes of a node, for clusters that start one program on each node.

    python -m launch.node [--processes 8] [--folder DIR ...] -- command...

This program starts `--processes` processes of the command; several processes get
torchrun's variables. It passes signals on to them, and exits with the code that
launch/policy.py selects.

With --folder, node 0 sends SIGINT to its processes when the folder contains a file
`stop`: then the run saves and stops for good. Each node counts its crashes in a file of
the folder. After a crash that may be retried, this program exits with ABORTED, so that
the cluster starts it again.
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
_POLL_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def node_command(
    words: Sequence[str],
    processes: int = 1,
    folder: str | None = None,
    max_restarts: int = 0,
    backoff_s: float = 0,
) -> list[str]:
    """Return the words to put before a command, so that `launch.node` runs it.

    `words` start `launch.node`.
    """
    words = [*words, "--processes", str(processes)]
    if folder is not None:
        limits = ["--max-restarts", str(max_restarts), "--backoff", str(backoff_s)]
        words += ["--folder", folder, *limits]
    return [*words, "--"]


def main(arguments: Sequence[str]) -> int:
    """Run the node's processes until all have ended; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m launch.node")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--folder", type=epath.Path)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--backoff", type=float, default=0)
    parser.add_argument("--look", type=float, default=_POLL_S)
    command = list(arguments)
    separator = command.index("--")
    options = parser.parse_args(command[:separator])
    node_rank = int(os.environ.get("NODE_RANK", "0"))
    if asked_to_stop(options.folder):
        return STOPPED
    processes = ProcessGroup()
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: processes.send_signal(number))
    for local_rank in range(options.processes):
        ranks = torchrun_variables(local_rank, options.processes, node_rank)
        processes.add(command[separator + 1 :], env={**os.environ, **ranks})
    if options.folder is not None and node_rank == 0:
        thread_args = processes, options.folder, options.look
        threading.Thread(target=_stop_if_asked, args=thread_args, daemon=True).start()
    verdict, code = judge(processes.wait())
    # No process is left that needs a signal. While Python shuts down, a signal would
    # only disturb it, so signals are ignored from here on.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if verdict is not Verdict.crashed or options.folder is None:
        return code
    return _count_crash(code, options.folder / f"crashes-{node_rank}", options)


def asked_to_stop(folder: epath.Path | None) -> bool:
    """Return whether a folder contains a file `stop`; False if it cannot be read."""
    try:
        return folder is not None and (folder / STOP).exists()
    except Exception as error:  # each object store's client has its own errors
        print(f"cannot read {folder}: {error}", file=sys.stderr)
        return False


def _count_crash(code: int, count_file: epath.Path, options: argparse.Namespace) -> int:
    """Count a crash; return ABORTED after a pause, or `code` past the limit."""
    crashes = 1 + int(count_file.read_text() if count_file.exists() else 0)
    count_file.write_text(str(crashes))
    pause_s = pause_after_crash(code, crashes, options.max_restarts, options.backoff)
    if pause_s is None:
        return code
    time.sleep(pause_s)
    return ABORTED


def _stop_if_asked(processes: ProcessGroup, folder: epath.Path, poll_s: float) -> None:
    """Wait for a file `stop`, then send SIGINT to the processes once."""
    while not asked_to_stop(folder):
        time.sleep(poll_s)
    processes.send_signal(signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
