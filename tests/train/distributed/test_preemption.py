"""Preemption: at which step all act on them; signals, at any time."""

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
from train.distributed.preemption import _AFTER, _BEFORE, _LEAVE, _due_step

# A process in one of its phases, that takes preemption.
PROGRAM = """
import contextlib, hashlib, os, sys, time
from train.distributed.preemption import SAVE, Preemption

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
    """Send signals to the program, once it is ready; give its code and its words."""

    def run(phase: str, *signals: int) -> tuple[int, str]:
        program = tmp_path / "program.py"
        said = tmp_path / OUT
        program.write_text(PROGRAM)
        process = forks.start([str(program), phase], tmp_path)
        while not (said.exists() and said.read_text().startswith("ready\n")):
            os.kill(process, 0)  # it lives
            time.sleep(0.01)
        time.sleep(0.3)
        for number in signals:
            with suppress(ProcessLookupError):  # the one before may have ended it
                os.kill(process, number)
            time.sleep(0.3)
        code = forks.wait()
        return code, said.read_text().removeprefix("ready\n")

    return run


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((n, 42) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)),
        (signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_the_loop_after_a_step(run, number, code):
    found, said = run("loop", number)
    assert found == code
    assert said.startswith("stopped")
    assert "left" not in said


def test_a_signal_after_the_last_save_leaves_at_once(run):
    found, said = run("after", signal.SIGTERM)
    assert (found, said) == (42, "left with 42\n")


def test_notices_until_the_interpreter_is_gone_change_nothing(run):
    """Python restores the default actions long before the process is gone."""
    notices = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
    assert run("closed", *notices) == (0, "ended\n")


def test_a_signal_while_the_main_thread_compiles_leaves_at_once(run):
    found, said = run("before", signal.SIGTERM)
    assert (found, said) == (42, "left with 42\n")


def test_ctrl_c_twice_leaves_in_the_midst_of_a_step(run):
    found, said = run("long", signal.SIGINT, signal.SIGINT)
    assert (found, said) == (130, "")


def test_a_save_is_due_after_the_next_step(run):
    _, said = run("save", signal.SIGTERM)
    assert said.startswith("saved 4\n")
    assert said.count("saved") == 1


steps = st.integers(0, 3)


@given(st.lists(steps, min_size=1), st.integers(0, 10**6))
def test_all_stop_after_the_first_step_that_none_has_passed(ahead, passed):
    where = [passed + n for n in ahead]
    assert _due_step(where) == max(where) + 1


@given(st.permutations([_BEFORE, 5, 6]))
def test_where_one_has_not_begun_all_leave(where):
    assert _due_step(list(where)) == _LEAVE


def test_those_through_with_the_last_step_wait_for_the_others():
    assert _due_step([_AFTER, 9, _AFTER]) == 10
    assert _due_step([_AFTER, _AFTER]) == _LEAVE
