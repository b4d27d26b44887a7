"""The supervisor with scripted attempts."""

import json
import os
import signal
import threading

import pytest

from launch import supervisor as supervisor_module
from launch.supervisor import Supervisor
from tests.launch.kinds import Played


@pytest.fixture
def play(tmp_path):
    """Return a function that supervises attempts with given codes.

    It returns the exit code and the number of attempts.
    """

    def play(*attempts, steps=(), max_restarts=10):
        remaining = list(attempts)
        remaining_steps = list(steps)
        supervisor = Supervisor(
            start=lambda: Played(remaining.pop(0)),
            read_step=lambda: remaining_steps.pop(0) if remaining_steps else None,
            max_restarts=max_restarts,
            backoff_s=0,
            diary=tmp_path / "attempts.jsonl",
        )
        code = supervisor.run()
        return code, len(attempts) - len(remaining)

    return play


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(supervisor_module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(supervisor_module, "_OWNED_PAUSE_S", 0.0)


def test_preemptions_and_lost_hosts_do_not_count(play):
    interruptions = [[42, 42], [134], [None, 134], [75]] * 5
    assert play(*interruptions, [0, 0], max_restarts=0) == (0, 21)


def test_crashes_count(play):
    assert play([1], [139], [1], [1], steps=[1, 2, 3, 4], max_restarts=2) == (1, 3)
    assert play([1], [0], max_restarts=1) == (0, 2)


def test_three_crashes_in_a_row_at_one_step_end_the_run(play):
    assert play(*[[139]] * 9, steps=[5, 7, 7, 7, 7]) == (70, 4)
    assert play(*[[139]] * 9, steps=[7, 7, 8, 7, 7, 7]) == (70, 6)


def test_unknown_steps_never_count_as_one_step(play):
    assert play([1], [1], [1], [1], [0], max_restarts=4) == (0, 5)


@pytest.mark.parametrize("code", [78, 65, 70, 130, 3, 4])
def test_a_code_that_a_restart_cannot_mend_is_final(play, code):
    assert play([code, 134], [0]) == (code, 1)


@pytest.mark.parametrize(
    ("number", "codes", "code"),
    [
        (signal.SIGTERM, [42, 42], 42),
        (signal.SIGHUP, [42, 42], 42),
        (signal.SIGINT, [130, 130], 130),
        (signal.SIGTERM, [0, 0], 0),  # the signal came too late
    ],
)
def test_a_signal_is_passed_on_and_ends_the_supervisor(tmp_path, number, codes, code):
    attempt = Played([], stopped=codes)
    diary = tmp_path / "attempts.jsonl"
    supervisor = Supervisor(lambda: attempt, lambda: None, 3, 0, diary)
    threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
    assert supervisor.run() == code
    assert attempt.told == [signal.SIGINT if code == 130 else signal.SIGTERM]
    assert json.loads(diary.read_text())["over"]


def test_a_signal_in_a_pause_ends_the_supervisor(tmp_path):
    attempts = []

    def start():
        attempts.append(Played([1]))
        return attempts[-1]

    supervisor = Supervisor(start, lambda: None, 3, 600, tmp_path / "attempts.jsonl")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert supervisor.run() == 130
    assert len(attempts) == 1


def test_a_stop_request_prevents_further_attempts(tmp_path):
    attempts = []

    def start():
        attempts.append(Played([42]))
        return attempts[-1]

    diary = tmp_path / "attempts.jsonl"
    supervisor = Supervisor(
        start, lambda: None, 3, 0, diary, stop_requested=lambda: bool(attempts)
    )
    assert supervisor.run() == 130
    assert len(attempts) == 1
