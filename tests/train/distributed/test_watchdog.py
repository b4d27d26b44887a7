"""A watchdog ends a trainer that makes no progress, and writes its stacks."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from tests.train.distributed.trainers import stacks_in
from train.config import WatchdogConfig
from train.distributed import watchdog_process
from train.distributed.watchdog import Watchdog

pytestmark = pytest.mark.timeout(120)


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
    code, stderr = trainer.end()
    assert code == -signal.SIGABRT
    stacks = stacks_in(tmp_path)
    assert "in wait_for_metrics" in stacks
    assert "in read_for_ever" in stacks
    assert re.search(
        r'watchdog: process 0 on host \S+: no progress in phase "step" \(step 121\) '
        r"for 2 s, allowed 1.5 s\. Stacks: " + re.escape(f"{tmp_path}/stacks/"),
        stderr,
    )
    report = json.loads((tmp_path / "stacks" / "process0.json").read_text())
    assert report["phase"] == "step"
    assert report["step"] == 121


@pytest.mark.slow
def test_a_trainer_that_never_releases_the_interpreter_lock_is_ended(start, tmp_path):
    trainer = start("""
watchdog.phase("data", 3)
re.fullmatch("(a|aa)+", "a" * 200 + "b")
""")
    code, stderr = trainer.end()
    assert code == -signal.SIGABRT
    assert "fullmatch" in stacks_in(tmp_path)
    assert '"data" (step 3)' in stderr


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


def test_a_trainer_that_aborts_leaves_its_stacks(start, tmp_path):
    trainer = start("def lose_a_peer():\n    os.abort()\nlose_a_peer()")
    code, stderr = trainer.end()
    assert code == -signal.SIGABRT
    assert "in lose_a_peer" in stacks_in(tmp_path)
    assert f"process 0 was aborted. Stacks: {tmp_path}/stacks/" in stderr


@pytest.mark.slow
def test_each_phase_has_its_own_time(start):
    code = "watchdog.phase('{}')\ntime.sleep(8)\nwatchdog.close()"
    names = ("init", "compile", "restore", "eval", "save")
    trainers = [
        start(code.format(name), **{f"{name}_timeout_s": 1.0}) for name in names
    ]
    patient = start(code.format("compile"))
    for name, trainer in zip(names, trainers, strict=True):
        code, stderr = trainer.end()
        assert code == -signal.SIGABRT, name
        assert f'"{name}" (step 0)' in stderr
    assert patient.end() == (0, "")


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
    code, stderr = fast.end()
    assert code == -signal.SIGABRT
    assert "allowed 1.8 s" in stderr


@pytest.mark.slow
def test_a_machine_that_slept_raises_no_alarm(start):
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
    pids = (trainer.popen.pid, trainer.watcher)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    assert trainer.end() == (0, "")


def test_a_disabled_watchdog_only_checks_the_names_of_phases(tmp_path, monkeypatch):
    monkeypatch.delattr(subprocess, "Popen")
    watchdog = Watchdog(WatchdogConfig(enabled=False), tmp_path, 0, 1)
    for phase in watchdog_process.PHASES:
        watchdog.phase(phase)
    watchdog.pace(1.0)
    with pytest.raises(ValueError, match="tuple"):
        watchdog.phase("steps")
    watchdog.close()
    assert not list(tmp_path.iterdir())
