"""`python -m launch.node`: the processes of a node, counted crashes and stops."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.program import command_words
from launch.node import STOP, main, node_command
from tests.fleet import REPOSITORY
from tests.program import program_code

WAITS = "import time; print('here', flush=True); time.sleep(60)"


def exit_with(code: int) -> list[str]:
    return ["--", sys.executable, "-c", f"raise SystemExit({code})"]


def run_counted(folder: Path, code: int, max_restarts: int = 2) -> int:
    limits = ["--max-restarts", f"{max_restarts}", "--backoff", "0"]
    return main(["--folder", f"{folder}", *limits, *exit_with(code)])


@pytest.fixture(autouse=True)
def handlers():
    """Restore the signal handlers after each test."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    previous = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_a_notice_while_the_node_ends_changes_nothing():
    """The interpreter clears a module at its end, which then sends the notices."""
    notices = tuple(map(int, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)))
    code = f"""
import os, sys
from data.program import command_words
from launch.node import main

class Late:
    def __del__(self, kill=os.kill, me=os.getpid()):
        for number in {notices}:
            kill(me, number)

os.late = Late()
sys.exit(main({exit_with(42)}))
"""
    result = subprocess.run([sys.executable, "-c", program_code(code)], cwd=REPOSITORY)
    assert result.returncode == 42


def test_processes_have_torchruns_variables_and_the_worst_code_wins(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("NODE_RANK", "2")
    program = (
        "import json, os, sys; names = ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'); "
        "local = os.environ['LOCAL_RANK']; "
        f"open(f'{tmp_path}/' + local, 'w').write("
        "json.dumps([os.environ[name] for name in names])); "
        "sys.exit({'0': 134, '1': 78, '2': 0}[local])"
    )
    assert main(["--processes", "3", "--", sys.executable, "-c", program]) == 78
    variables = [json.loads((tmp_path / f"{local}").read_text()) for local in range(3)]
    assert variables == [["6", "0", "3"], ["7", "1", "3"], ["8", "2", "3"]]


def test_crashes_are_counted_and_others_are_not(tmp_path):
    assert run_counted(tmp_path, 1) == 134  # a crash within the limit restarts
    for code in (42, 75, 134, 78, 0):
        assert run_counted(tmp_path, code) == code
    assert run_counted(tmp_path, 139) == 134
    assert run_counted(tmp_path, 1) == 1  # the third crash exceeds the limit of two
    assert not run_counted(tmp_path / "other", 0)


def start_node(*options: str, program: str = WAITS) -> subprocess.Popen[str]:
    command = node_command(command_words("launch.node"))[:-1]
    command = [*command, *options, "--", sys.executable, "-c", program]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def test_signals_are_passed_on():
    process = start_node(
        program="import signal, sys, time; "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42)); "
        "print('here', flush=True); time.sleep(60)"
    )
    process.terminate()
    assert process.wait(30) == 42


def test_a_stop_file_ends_the_node_for_good(tmp_path):
    process = start_node("--folder", f"{tmp_path}", "--look", "0.1")
    time.sleep(0.3)
    assert process.poll() is None
    (tmp_path / STOP).touch()
    assert process.wait(30) == 130
    # Another start does nothing either.
    assert main(["--folder", f"{tmp_path}", "--", "/no/such/program"]) == 130


def test_an_unreachable_store_stops_nothing(tmp_path, monkeypatch, capsys):
    from launch import node

    class Away:
        def __truediv__(self, name: str) -> "Away":
            return self

        def exists(self) -> bool:
            raise ConnectionError("no route")

    assert not node.asked_to_stop(Away())  # type: ignore[arg-type]
    assert "no route" in capsys.readouterr().err
