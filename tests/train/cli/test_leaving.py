"""A process ends when it is done, even if threads of libraries never end."""

import subprocess
import sys

import pytest

from tests.fleet import REPOSITORY
from tests.program import program_code

# The training command runs with a thread that never ends. Python waits at exit for
# such a thread, and for one of a pool.
STUCK = """
import atexit, runpy, sys, threading
from concurrent.futures import ThreadPoolExecutor
from data.program import PREFIX
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
runpy.run_module(PREFIX + "train", run_name="__main__")
"""


@pytest.mark.parametrize("stuck", ["none", "thread", "pool"])
def test_threads_that_never_end_change_neither_the_exit_code_nor_the_output(stuck):
    result = subprocess.run(
        [sys.executable, "-c", program_code(STUCK), stuck, "train.num_stepz=1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 78
    assert result.stdout == "not flushed called at exit\n"
    assert "train.num_stepz" in result.stderr
    assert ("threads have not ended" in result.stderr) == (stuck != "none")
