"""All processes act on a preemption after the same step; signals come at any time."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forks import OUT, Forks
from tests.program import program_code
from train.distributed.preemption import _AFTER, _BEFORE, _LEAVE, _due_step

# A process that handles preemption, in the phase that its argument names.
PROGRAM = """
import contextlib, hashlib, os, sys, time
from train.core.services import SAVE
from train.distributed.preemption import Preemption

with contextlib.closing(Preemption()) as preemption:
    preemption.before_exit = lambda code: print("left with", code, flush=True)
    phase = sys.argv[1]
    end = 0 if phase == "closed" else 10**6
    if phase == "before":
        print("ready", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as a compiler keeps it
    for step in range(end):
        found = preemption.step_done(step)
        if step == 0:
            print("ready", flush=True)
        if phase == "save" and step == 3:
            preemption.request(SAVE)
        if phase == "save" and found == SAVE:
            print("saved", step, flush=True)
        if isinstance(found, int):
            print("stopped", step, flush=True)
            sys.exit(found)
        if phase == "long" and step:
            time.sleep(60)
        if phase == "after":
            preemption.training_done()
            time.sleep(60)
        time.sleep(0.01)


class Slow:
    def __del__(self, sleep=time.sleep, write=os.write):
        write(1, b"ready\\n")
        sleep(2)
        write(1, b"ended\\n")


# The interpreter clears its modules at its end, and takes its time for this object.
os.slow = Slow()
"""


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Send signals to the program once it is ready; return its code and its output."""

    def run(phase: str, *signals: int) -> tuple[int, str]:
        program = tmp_path / "program.py"
        output = tmp_path / OUT
        program.write_text(program_code(PROGRAM))
        process = forks.start([str(program), phase], tmp_path)
        while not (output.exists() and output.read_text().startswith("ready\n")):
            os.kill(process, 0)  # This raises if the process has ended.
            time.sleep(0.01)
        time.sleep(0.3)
        for number in signals:
            with suppress(ProcessLookupError):  # The previous one may have ended it.
                os.kill(process, number)
            time.sleep(0.3)
        code = forks.wait()
        return code, output.read_text().removeprefix("ready\n")

    return run


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((n, 42) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)),
        (signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_the_loop_after_a_step(run, number, code):
    exit_code, output = run("loop", number)
    assert exit_code == code
    assert output.startswith("stopped")
    assert "left" not in output


def test_a_signal_after_the_last_save_leaves_at_once(run):
    exit_code, output = run("after", signal.SIGTERM)
    assert (exit_code, output) == (42, "left with 42\n")


def test_late_signals_do_not_change_the_exit_code(run):
    """Python restores the default actions long before the process is gone."""
    notices = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
    assert run("closed", *notices) == (0, "ended\n")


def test_a_signal_while_the_main_thread_compiles_leaves_at_once(run):
    exit_code, output = run("before", signal.SIGTERM)
    assert (exit_code, output) == (42, "left with 42\n")


def test_ctrl_c_twice_leaves_in_the_middle_of_a_step(run):
    exit_code, output = run("long", signal.SIGINT, signal.SIGINT)
    assert (exit_code, output) == (130, "")


def test_a_save_is_due_after_the_next_step(run):
    _, output = run("save", signal.SIGTERM)
    assert output.startswith("saved 4\n")
    assert output.count("saved") == 1


steps = st.integers(0, 3)


@given(st.lists(steps, min_size=1), st.integers(0, 10**6))
def test_all_stop_after_the_first_step_that_none_has_passed(offsets, base_step):
    positions = [base_step + n for n in offsets]
    assert _due_step(positions) == max(positions) + 1


@given(st.permutations([_BEFORE, 5, 6]))
def test_if_one_has_not_begun_all_leave(positions):
    assert _due_step(list(positions)) == _LEAVE


def test_processes_after_the_last_step_wait_for_the_others():
    assert _due_step([_AFTER, 9, _AFTER]) == 10
    assert _due_step([_AFTER, _AFTER]) == _LEAVE
