"""Attempts that watch remote processes: `attempt.py`, `subprocesses.py`."""

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
from train.liveness import Process


def test_a_signal_ends_a_pause():
    wait = Wait()
    assert not wait(0.01)
    threading.Timer(0.2, lambda: wait.record(signal.SIGTERM)).start()
    assert wait(3600)
    start = time.monotonic()
    assert wait(0.3, handled=1)  # it waits, and reports the signal that had come
    assert time.monotonic() - start > 0.2


@pytest.mark.parametrize(
    ("run", "code"), [(run_captured, 78), (run_tool, 1), (ask_tool, 1)]
)
def test_a_missing_program_is_named(run, code):
    with pytest.raises(Exit, match="kubectl is not installed") as raised:
        run(["/nowhere/kubectl", "get"])
    assert raised.value.code == code


def test_a_tool_runs_in_its_own_session():
    """Therefore Ctrl-C in the terminal does not reach it."""
    ask = [sys.executable, "-S", "-c", "import os; print(os.getsid(0))"]
    assert int(run_captured(ask)[1]) != os.getsid(0)


def test_a_command_that_hangs_is_killed_with_its_children_and_its_output_counts(
    tmp_path,
):
    """It stands for gcloud's ssh to all machines, one of which hangs."""
    line = f"sleep 600 & echo $! >{tmp_path}/pid; echo said; printf half; wait"
    code, out, _ = run_captured(["bash", "-c", line], timeout_s=4)
    assert (code, out) == (1, b"said\n")
    child = int((tmp_path / "pid").read_text())
    until(lambda: not Process.of(child).alive())


class Scripted:
    """Hosts that give the listed answers, and then repeat the last one."""

    def __init__(self, processes: int, *script: Mapping[str, State]):
        self.processes = processes
        self.poll_s = 0.02
        self._answers = list(script)
        self.told = []

    def ask(self, verb: str, *words: str | int) -> Mapping[str, State]:
        if verb == "signal":
            self.told.append(words)
            return {"a": State("told")}
        first, *later = self._answers
        self._answers = later or [first]
        return first

    def output(self, skip: int) -> bytes:
        return b""

    def tail(self, code: int) -> str:
        return ""

    def gone(self) -> bool:
        return False


def codes_of_attempt(hosts: Any, folder: Path) -> Sequence[int | None]:
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
        ([{"a": RUNS, "b": RUNS}, {}], [None, None]),  # both stay silent
        ([{"a": ABORTED}], [134, None]),  # the second never answers
        (
            [{"a": State("lost"), "b": RUNS}, {"a": RUNS, "b": DONE}, {"a": DONE}],
            [0, 0],
        ),
    ],
)
def test_an_attempt_ends_with_the_codes_of_its_processes(
    monkeypatch, tmp_path, answers, codes
):
    monkeypatch.setattr(attempt, "LOST_S", 0.3)
    monkeypatch.setattr(attempt, "SILENT_S", 0.2)
    hosts = Scripted(2, *answers)
    assert codes_of_attempt(hosts, tmp_path) == codes


def test_a_silent_host_is_not_waited_for_long_once_others_have_ended(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(attempt, "SILENT_S", 0.2)
    hosts = Scripted(2, {"a": RUNS, "b": RUNS}, {"a": ABORTED})
    assert codes_of_attempt(hosts, tmp_path) == [134, None]  # LOST_S is 10 minutes


def test_processes_that_do_not_end_are_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(attempt, "LAST_SAVE_S", 0.1)
    answers = [{"a": DONE, "b": RUNS}] * 20
    hosts = Scripted(2, *answers, {"a": DONE, "b": State("ended", 137)})
    assert codes_of_attempt(hosts, tmp_path) == [0, 137]
    assert ("KILL",) in hosts.told
