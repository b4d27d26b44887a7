"""`python -m launch.node`: the processes of a node, and what its cluster cannot do."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.node import STOP, main, node_command
from tests.fleet import REPOSITORY

WAITS = "import time; print('here', flush=True); time.sleep(60)"


def ends(code: int) -> list[str]:
    return ["--", sys.executable, "-c", f"raise SystemExit({code})"]


def counted(folder: Path, code: int, most: int = 2) -> int:
    limits = ["--max-restarts", f"{most}", "--backoff", "0"]
    return main(["--folder", f"{folder}", *limits, *ends(code)])


@pytest.fixture(autouse=True)
def handlers():
    """Leave the signals as they were."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_notice_while_the_node_ends_changes_nothing():
    """The interpreter clears its modules at its end; one sends the notices then."""
    notices = tuple(map(int, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)))
    code = f"""
import os, sys
from launch.node import main

class Late:
    def __del__(self, kill=os.kill, me=os.getpid()):
        for number in {notices}:
            kill(me, number)

os.late = Late()
sys.exit(main({ends(42)}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY)
    assert done.returncode == 42


def test_several_have_torchruns_variables_and_end_as_their_worst(tmp_path, monkeypatch):
    monkeypatch.setenv("NODE_RANK", "2")
    program = (
        "import json, os, sys; names = ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'); "
        "local = os.environ['LOCAL_RANK']; "
        f"open(f'{tmp_path}/' + local, 'w').write("
        "json.dumps([os.environ[name] for name in names])); "
        "sys.exit({'0': 134, '1': 78, '2': 0}[local])"
    )
    assert main(["--processes", "3", "--", sys.executable, "-c", program]) == 78
    told = [json.loads((tmp_path / f"{local}").read_text()) for local in range(3)]
    assert told == [["6", "0", "3"], ["7", "1", "3"], ["8", "2", "3"]]


def test_crashes_are_counted_and_others_are_not(tmp_path):
    assert counted(tmp_path, 1) == 134  # again
    for code in (42, 75, 134, 78, 0):
        assert counted(tmp_path, code) == code
    assert counted(tmp_path, 139) == 134
    assert counted(tmp_path, 1) == 1  # once more than two
    assert not counted(tmp_path / "other", 0)


def started(*own: str, program: str = WAITS) -> subprocess.Popen[str]:
    command = node_command(sys.executable)[1:-1]
    command = [sys.executable, *command, *own, "--", sys.executable, "-c", program]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def test_signals_are_passed_on():
    process = started(
        program="import signal, sys, time; "
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42)); "
        "print('here', flush=True); time.sleep(60)"
    )
    process.terminate()
    assert process.wait(30) == 42


def test_a_person_stops_it_for_good(tmp_path):
    process = started("--folder", f"{tmp_path}", "--look", "0.1")
    time.sleep(0.3)
    assert process.poll() is None
    (tmp_path / STOP).touch()
    assert process.wait(30) == 130
    began = time.monotonic()  # nor does another start do anything
    assert main(["--folder", f"{tmp_path}", "--", "/no/such/program"]) == 130
    assert time.monotonic() - began < 5


def test_a_store_that_is_away_stops_nothing(tmp_path, monkeypatch, capsys):
    from launch import node

    class Away:
        def __truediv__(self, name: str) -> "Away":
            return self

        def exists(self) -> bool:
            raise ConnectionError("no route")

    assert not node.asked_to_stop(Away())  # type: ignore[arg-type]
    assert "no route" in capsys.readouterr().err
