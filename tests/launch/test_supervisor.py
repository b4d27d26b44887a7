"""The supervisor on attempts that a script plays."""

import json
import os
import signal
import threading

import pytest

from launch.supervisor import Supervisor
from tests.launch.kinds import Played


@pytest.fixture
def play(tmp_path):
    """Play attempts that end with these codes; give exit code and their number."""

    def play(*attempts, steps=(), max_restarts=10):
        left = list(attempts)
        at = list(steps)
        supervisor = Supervisor(
            start=lambda: Played(left.pop(0)),
            read_step=lambda: at.pop(0) if at else None,
            max_restarts=max_restarts,
            backoff_s=0,
            diary=tmp_path / "attempts.jsonl",
        )
        code = supervisor.run()
        return code, len(attempts) - len(left)

    return play


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("launch.supervisor._PAUSE_S", 0.0)
    monkeypatch.setattr("launch.supervisor._OWNED_PAUSE_S", 0.0)


def test_preemptions_and_lost_hosts_do_not_count(play):
    often = [[42, 42], [134], [None, 134], [75]] * 5
    assert play(*often, [0, 0], max_restarts=0) == (0, 21)


def test_crashes_count(play):
    assert play([1], [139], [1], [1], steps=[1, 2, 3, 4], max_restarts=2) == (1, 3)
    assert play([1], [0], max_restarts=1) == (0, 2)


def test_never_three_times_at_one_step(play):
    assert play(*[[139]] * 9, steps=[5, 7, 7, 7, 7]) == (70, 4)
    assert play(*[[139]] * 9, steps=[7, 7, 8, 7, 7, 7]) == (70, 6)


def test_an_unknown_step_is_no_step(play):
    assert play([1], [1], [1], [1], [0], max_restarts=4) == (0, 5)


@pytest.mark.parametrize("code", [78, 65, 70, 130, 3, 4])
def test_what_another_start_would_not_mend(play, code):
    assert play([code, 134], [0]) == (code, 1)


@pytest.mark.parametrize(
    ("number", "codes", "code"),
    [
        (signal.SIGTERM, [42, 42], 42),
        (signal.SIGHUP, [42, 42], 42),
        (signal.SIGINT, [130, 130], 130),
        (signal.SIGTERM, [0, 0], 0),  # it came too late
    ],
)
def test_a_signal_goes_on_and_ends_it(tmp_path, number, codes, code):
    attempt = Played([], stopped=codes)
    diary = tmp_path / "attempts.jsonl"
    supervisor = Supervisor(lambda: attempt, lambda: None, 3, 0, diary)
    threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
    assert supervisor.run() == code
    assert attempt.told == [signal.SIGINT if code == 130 else signal.SIGTERM]
    assert json.loads(diary.read_text())["over"]


def test_a_signal_in_a_pause_ends_it(tmp_path):
    made = []

    def start():
        made.append(Played([1]))
        return made[-1]

    supervisor = Supervisor(start, lambda: None, 3, 600, tmp_path / "attempts.jsonl")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert supervisor.run() == 130
    assert len(made) == 1


def test_asked_to_stop_elsewhere_it_starts_no_more(tmp_path):
    made = []

    def start():
        made.append(Played([42]))
        return made[-1]

    diary = tmp_path / "attempts.jsonl"
    supervisor = Supervisor(
        start, lambda: None, 3, 0, diary, stop_requested=lambda: bool(made)
    )
    assert supervisor.run() == 130
    assert len(made) == 1
