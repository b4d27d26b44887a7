"""What watches processes on other machines: `attempt.py`, `subprocesses.py`."""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.remote import attempt
from launch.remote.attempt import RemoteAttempt
from launch.remote.run_script import State
from launch.subprocesses import ask_tool, run_captured, run_tool
from launch.supervisor import Wait
from tests.launch.remote.stage import until
from train.errors import Exit
from train.run.liveness import Process


def test_a_signal_ends_a_pause():
    wait = Wait()
    assert not wait(0.01)
    threading.Timer(0.2, lambda: wait.record(signal.SIGTERM)).start()
    assert wait(3600)
    began = time.monotonic()
    assert wait(0.3, handled=1)  # waits, and says that one came
    assert time.monotonic() - began > 0.2


@pytest.mark.parametrize(
    ("run", "code"), [(run_captured, 78), (run_tool, 1), (ask_tool, 1)]
)
def test_a_missing_program_is_named(run, code):
    with pytest.raises(Exit, match="kubectl is not installed") as raised:
        run(["/nowhere/kubectl", "get"])
    assert raised.value.code == code


def test_what_is_called_has_a_session_of_its_own():
    """Ctrl-C in the terminal does not reach it."""
    ask = [sys.executable, "-S", "-c", "import os; print(os.getsid(0))"]
    assert int(run_captured(ask)[1]) != os.getsid(0)


def test_what_hangs_is_killed_with_all_it_started_and_what_it_said_counts(tmp_path):
    """As gcloud's ssh to all machines, of which one hangs."""
    line = f"sleep 600 & echo $! >{tmp_path}/pid; echo said; printf half; wait"
    code, out, _ = run_captured(["bash", "-c", line], timeout_s=4)
    assert (code, out) == (1, b"said\n")
    started = int((tmp_path / "pid").read_text())
    until(lambda: not Process.of(started).alive())


class Scripted:
    """Hosts that answer by a list, its last entry for good."""

    def __init__(self, processes: int, *answers: Mapping[str, State]):
        self.processes = processes
        self.poll_s = 0.02
        self._answers = list(answers)
        self.told = []

    def ask(self, verb: str, *words: str | int) -> Mapping[str, State]:
        if verb == "signal":
            self.told.append(words)
            return {"a": State("told")}
        first, *rest = self._answers
        self._answers = rest or [first]
        return first

    def output(self, skip: int) -> bytes:
        return b""

    def tail(self, code: int) -> str:
        return ""

    def gone(self) -> bool:
        return False


def watched(hosts: Any, folder: Path) -> Sequence[int | None]:
    return RemoteAttempt(hosts, folder / "log", lambda wait: True).wait()


RUNS = State("running")
DONE = State("ended", 0)
ABORTED = State("ended", 134)


@pytest.mark.parametrize(
    ("answers", "codes"),
    [
        ([{"a": RUNS, "b": RUNS}, {"a": DONE, "b": RUNS}, {"b": DONE}], [0, 0]),
        ([{"a": RUNS, "b": RUNS}, {}, {"a": DONE, "b": DONE}], [0, 0]),
        ([{"a": RUNS, "b": RUNS}, {"a": ABORTED, "b": State("lost")}], [134, None]),
        ([{"a": RUNS, "b": RUNS}, {}], [None, None]),  # silent for long
        ([{"a": ABORTED}], [134, None]),  # never heard of
        (
            [{"a": State("lost"), "b": RUNS}, {"a": RUNS, "b": DONE}, {"a": DONE}],
            [0, 0],
        ),
    ],
)
def test_ends(monkeypatch, tmp_path, answers, codes):
    monkeypatch.setattr(attempt, "LOST_S", 0.3)
    monkeypatch.setattr(attempt, "SILENT_S", 0.2)
    hosts = Scripted(2, *answers)
    assert watched(hosts, tmp_path) == codes


def test_who_is_silent_when_others_have_ended_is_not_waited_for_long(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(attempt, "SILENT_S", 0.2)
    hosts = Scripted(2, {"a": RUNS, "b": RUNS}, {"a": ABORTED})
    assert watched(hosts, tmp_path) == [134, None]  # LOST_S are 10 minutes


def test_those_that_do_not_end_are_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(attempt, "LAST_SAVE_S", 0.1)
    many = [{"a": DONE, "b": RUNS}] * 20
    hosts = Scripted(2, *many, {"a": DONE, "b": State("ended", 137)})
    assert watched(hosts, tmp_path) == [0, 137]
    assert ("KILL",) in hosts.told
