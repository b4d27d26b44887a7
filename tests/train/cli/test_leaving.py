"""A process ends when it is done, whatever threads libraries have left behind."""

import subprocess
import sys

import pytest

from tests.fleet import REPOSITORY

# The door, with a thread that never ends, beside one that Python's own pool waits for.
STUCK = """
import atexit, runpy, sys, threading
from concurrent.futures import ThreadPoolExecutor
from train.cli import leaving

atexit.register(print, "called at exit")
leaving.GRACE_S = 0.2
never = threading.Event()
if "thread" in sys.argv[1]:
    threading.Thread(target=never.wait).start()
if "pool" in sys.argv[1]:
    ThreadPoolExecutor(1).submit(never.wait)
sys.argv = ["train", sys.argv[2]]
print("not flushed", end=" ")
runpy.run_module("train", run_name="__main__")
"""


@pytest.mark.parametrize("stuck", ["none", "thread", "pool"])
def test_threads_that_never_end_change_neither_the_exit_code_nor_what_is_said(stuck):
    ended = subprocess.run(
        [sys.executable, "-c", STUCK, stuck, "train.num_stepz=1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 78
    assert ended.stdout == "not flushed called at exit\n"
    assert "train.num_stepz" in ended.stderr
    assert ("threads have not ended" in ended.stderr) == (stuck != "none")
