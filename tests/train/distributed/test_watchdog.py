"""Real trainers of a few lines, each with its watchdog."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY
from train.config import WatchdogConfig
from train.distributed import watchdog_process
from train.distributed.watchdog import Watchdog

SETUP = """
import os, re, signal, sys, threading, time
from etils import epath
from train.config import WatchdogConfig
from train.distributed.watchdog import Watchdog

folder, process, processes = epath.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = WatchdogConfig(step_timeout_s=1.5, **eval(sys.argv[4]))
watchdog = Watchdog(config, folder, process, processes)
print(watchdog._child.pid if config.enabled else 0, flush=True)
"""

pytestmark = pytest.mark.timeout(120)


class Trainer:
    """A trainer that runs, and what it said."""

    def __init__(self, popen: subprocess.Popen[str]):
        self.popen = popen
        assert popen.stdout
        self.watcher = int(popen.stdout.readline() or 0)

    def end(self) -> tuple[int, str]:
        """Wait for its end and its watcher's: they hold the same stderr."""
        _, said = self.popen.communicate(timeout=60)
        return self.popen.returncode, said


Start = Callable[..., Trainer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Run code after a watchdog was started; kill what is left.

    start(code, process=0, processes=1, folder=tmp_path, wrapper=(), **config)
    """
    started: list[Trainer] = []

    def start(
        code: str,
        process: int = 0,
        processes: int = 1,
        folder: object = tmp_path,
        wrapper: tuple[str, ...] = (),
        **config: object,
    ) -> Trainer:
        arguments = [str(folder), str(process), str(processes), repr(config)]
        popen = subprocess.Popen(
            [*wrapper, sys.executable, "-c", SETUP + code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        started.append(Trainer(popen))
        return started[-1]

    yield start
    for trainer in started:
        trainer.popen.kill()
        trainer.popen.communicate()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def await_end(pid: int) -> None:
    while alive(pid):
        time.sleep(0.05)


def stacks_in(folder: Path) -> str:
    (file,) = (folder / "stacks").glob("*-process0.txt")
    return file.read_text()


def test_a_trainer_stuck_in_python_leaves_its_stacks_and_ends(start, tmp_path):
    trainer = start("""
def read_for_ever():
    time.sleep(1000)

threading.Thread(target=read_for_ever, daemon=True).start()
watchdog.phase("step", 120)
watchdog.beat(121)
def wait_for_metrics():
    time.sleep(1000)
wait_for_metrics()
""")
    code, said = trainer.end()
    assert code == -signal.SIGABRT
    stacks = stacks_in(tmp_path)
    assert "in wait_for_metrics" in stacks
    assert "in read_for_ever" in stacks
    assert re.search(
        r'watchdog: process 0 on host \S+: no progress in phase "step" \(step 121\) '
        r"for 2 s, allowed 1.5 s\. Stacks: " + re.escape(f"{tmp_path}/stacks/"),
        said,
    )
    report = json.loads((tmp_path / "stacks" / "process0.json").read_text())
    assert report["phase"] == "step"
    assert report["step"] == 121


@pytest.mark.slow
def test_the_lock_of_the_interpreter_held_for_ever_does_not_help(start, tmp_path):
    trainer = start("""
watchdog.phase("data", 3)
re.fullmatch("(a|aa)+", "a" * 200 + "b")
""")
    code, said = trainer.end()
    assert code == -signal.SIGABRT
    assert "fullmatch" in stacks_in(tmp_path)
    assert '"data" (step 3)' in said


def test_a_stopped_trainer_ends_with_its_stacks(start, tmp_path):
    trainer = start("""
watchdog.phase("step", 1)
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1000)
""")
    assert trainer.end()[0] == -signal.SIGABRT
    assert 'File "<string>"' in stacks_in(tmp_path)


@pytest.mark.slow
def test_a_trainer_that_cannot_abort_is_killed(start):
    trainer = start("""
import faulthandler
faulthandler.disable()
signal.signal(signal.SIGABRT, signal.SIG_IGN)
watchdog.phase("step", 1)
time.sleep(1000)
""")
    assert trainer.end()[0] == -signal.SIGKILL


def test_a_killed_trainer_leaves_nothing_behind(start, tmp_path):
    trainer = start("time.sleep(1000)")
    assert alive(trainer.watcher)
    trainer.popen.kill()
    assert trainer.end() == (-signal.SIGKILL, "")
    await_end(trainer.watcher)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ending", ["watchdog.close()", "sys.exit()", "os._exit(0)"])
def test_a_trainer_that_finishes_leaves_nothing_behind(start, tmp_path, ending):
    trainer = start(f"watchdog.phase('step', 1)\n{ending}")
    assert trainer.end() == (0, "")
    await_end(trainer.watcher)
    assert not list(tmp_path.iterdir())


def test_closing_waits_for_the_watcher_and_a_late_beat_is_harmless(start):
    trainer = start("""
pid = watchdog._child.pid
watchdog.close()
try:
    os.kill(pid, 0)
except ProcessLookupError:
    watchdog.beat(5)
    watchdog.close()
    sys.exit(7)
""")
    assert trainer.end() == (7, "")


def test_an_abort_of_its_own_leaves_its_stacks(start, tmp_path):
    trainer = start("def lose_a_peer():\n    os.abort()\nlose_a_peer()")
    code, said = trainer.end()
    assert code == -signal.SIGABRT
    assert "in lose_a_peer" in stacks_in(tmp_path)
    assert f"process 0 was aborted. Stacks: {tmp_path}/stacks/" in said


@pytest.mark.slow
def test_signs_of_life_and_phases_begin_the_time_anew(start):
    trainer = start(
        """
for step in range(10):
    watchdog.phase("data")
    time.sleep(0.2)
    watchdog.phase("step")
    time.sleep(0.2)
    watchdog.beat(step)
watchdog.phase("eval")
for batch in range(8):
    time.sleep(0.5)
    watchdog.beat(step)
watchdog.close()
""",
        eval_timeout_s=1.5,
    )
    assert trainer.end() == (0, "")


@pytest.mark.slow
def test_each_phase_has_its_own_time(start):
    code = "watchdog.phase('{}')\ntime.sleep(8)\nwatchdog.close()"
    names = ("init", "compile", "restore", "eval", "save")
    short = [start(code.format(name), **{f"{name}_timeout_s": 1.0}) for name in names]
    long = start(code.format("compile"))
    for name, trainer in zip(names, short, strict=True):
        code, said = trainer.end()
        assert code == -signal.SIGABRT, name
        assert f'"{name}" (step 0)' in said
    assert long.end() == (0, "")


@pytest.mark.slow
def test_a_slow_pace_gives_steps_more_time(start):
    code = """
for seconds in (0.01, {0}, {0}):
    watchdog.pace(seconds)
watchdog.phase("step")
time.sleep(8)
watchdog.close()
"""
    slow = start(code.format(5), step_timeout_factor=2)
    fast = start(code.format(0.6), step_timeout_factor=3)
    assert slow.end() == (0, "")
    code, said = fast.end()
    assert code == -signal.SIGABRT
    assert "allowed 1.8 s" in said


@pytest.mark.slow
def test_a_machine_that_slept_is_no_alarm(start):
    code = """
watchdog.phase("eval")
print("ready", flush=True)
for _ in range(10):
    time.sleep(0.1)
for batch in range(20):
    watchdog.beat(1)
    time.sleep(0.25)
watchdog.close()
"""
    trainer = start(code, eval_timeout_s=3.0)
    assert trainer.popen.stdout.readline() == "ready\n"
    both = (trainer.popen.pid, trainer.watcher)
    for pid in both:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in reversed(both):
        os.kill(pid, signal.SIGCONT)
    assert trainer.end() == (0, "")


@pytest.mark.slow
def test_signals_for_all_processes_do_not_end_the_watcher(start):
    trainer = start("watchdog.phase('step', 1)\ntime.sleep(1000)")
    ignored = 0
    while not ignored & 1 << signal.SIGUSR2 - 1:  # it has started
        status = Path(f"/proc/{trainer.watcher}/status").read_text()
        ignored = int(re.findall(r"SigIgn:\s*(\w+)", status)[0], 16)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        os.kill(trainer.watcher, getattr(signal, name))
    assert trainer.end()[0] == -signal.SIGABRT


@pytest.mark.slow
def test_the_process_behind_is_named_and_reports_of_earlier_starts_are_not(
    start, tmp_path
):
    stale = watchdog_process.Stall(1, "old", "init", 0, 9.0, 1.0)
    (tmp_path / "stacks").mkdir()
    for process in (1, 2):
        file = tmp_path / "stacks" / f"process{process}.json"
        file.write_text(json.dumps(stale._replace(process=process)._asdict()))
        os.utime(file, (time.time() - 60,) * 2)
    check_that_process_1_is_named(start, tmp_path, tmp_path / "go")


@pytest.mark.slow
def test_stacks_and_reports_go_far_away(start, bucket, tmp_path):
    check_that_process_1_is_named(start, "s3://bucket/runs/a", tmp_path / "go")
    (stacks,) = bucket.glob("bucket/runs/a/stacks/*-process1.txt")
    assert b'File "<string>"' in bucket.cat_file(stacks)


def check_that_process_1_is_named(start: Start, folder: object, go: Path) -> None:
    """Both are in their phases from the same moment on, however late one starts."""
    waits = f"""
while not os.path.exists({str(go)!r}):
    time.sleep(0.01)
watchdog.phase(%r, 118)
time.sleep(1000)
"""
    waiting = start(waits % "step", 0, 3, folder)
    reading = start(waits % "data", 1, 3, folder)
    go.touch()
    for trainer in (waiting, reading):
        code, said = trainer.end()
        assert code == -signal.SIGABRT
        assert re.search(
            r"; behind: process 1 on host \S+ \(phase data, step 118\); "
            rf"not heard of: process 2\. Stacks: {folder}/stacks/",
            said,
        )


def test_who_is_behind():
    def at(process: int, phase: str, step: int) -> watchdog_process.Stall:
        return watchdog_process.Stall(process, "h", phase, step, 1.0, 1.0)

    behind = watchdog_process.behind
    ahead = [at(0, "step", 9), at(2, "step", 9)]
    slow = behind([*ahead, at(1, "step", 8)], 3)
    assert slow == "process 1 on host h (phase step, step 8)"
    assert behind([*ahead, at(1, "save", 9)], 3).startswith("process 1 ")
    assert behind([*ahead, at(1, "log", 9)], 3).startswith("process 1 ")
    assert behind([at(0, "eval", 9), at(1, "save", 9)], 2).startswith("process 0 ")
    assert behind([at(0, "compile", 0), at(1, "init", 0)], 2).startswith("process 1 ")
    assert behind(ahead[:1], 1) == "none, all heard of are here"
    many = [at(k, "data", 9) for k in range(3, 15)]
    assert behind([*ahead, *many], 16).endswith(
        "(phase data, step 9) and 4 more; not heard of: process 1, 15"
    )


def test_a_folder_that_cannot_be_written_to_leaves_the_stacks_on_stderr(
    start, tmp_path
):
    (tmp_path / "stacks").write_text("a file")
    trainer = start("def wait():\n    time.sleep(1000)\nwatchdog.phase('step')\nwait()")
    code, said = trainer.end()
    assert code == -signal.SIGABRT
    assert "stacks does not answer: FileExistsError" in said
    assert "in wait" in said


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(["unshare", "-Urpf", "true"], capture_output=True).returncode,
    reason="needs namespaces of one's own",
)
def test_the_first_process_of_a_container_ends_too(start, tmp_path):
    trainer = start(
        "assert os.getpid() == 1\nwatchdog.phase('step')\ntime.sleep(1000)",
        wrapper=("unshare", "-Urpf", "--kill-child"),
    )
    code, said = trainer.end()
    assert code == signal.SIGABRT  # as an exit code: nothing can signal that process
    assert "no progress" in said
    assert 'File "<string>"' in stacks_in(tmp_path)


def test_the_watcher_starts_with_the_standard_library_alone():
    tree = ast.parse(Path(watchdog_process.__file__).read_text())
    for node in tree.body:
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in sys.stdlib_module_names


def test_not_enabled_it_does_nothing_but_know_the_phases(tmp_path, monkeypatch):
    monkeypatch.delattr(subprocess, "Popen")
    watchdog = Watchdog(WatchdogConfig(enabled=False), tmp_path, 0, 1)
    for phase in watchdog_process.PHASES:
        watchdog.phase(phase)
    watchdog.pace(1.0)
    with pytest.raises(ValueError, match="tuple"):
        watchdog.phase("steps")
    watchdog.close()
    assert not list(tmp_path.iterdir())
