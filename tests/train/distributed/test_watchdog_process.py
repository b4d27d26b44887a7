"""The watcher of a trainer names stalled processes, survives signals, and ends."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.distributed.trainers import stacks_in
from train.distributed import watchdog_process

pytestmark = pytest.mark.timeout(120)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def await_end(pid: int) -> None:
    while alive(pid):
        time.sleep(0.05)


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


@pytest.mark.slow
def test_signals_for_all_processes_do_not_end_the_watcher(start):
    trainer = start("watchdog.phase('step', 1)\ntime.sleep(1000)")
    ignored = 0
    while not ignored & 1 << signal.SIGUSR2 - 1:  # It ignores this signal last.
        status = Path(f"/proc/{trainer.watcher}/status").read_text()
        ignored = int(re.findall(r"SigIgn:\s*(\w+)", status)[0], 16)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        os.kill(trainer.watcher, getattr(signal, name))
    assert trainer.end()[0] == -signal.SIGABRT


@pytest.mark.slow
def test_a_process_behind_the_others_is_named_without_stale_reports(start, tmp_path):
    old_report = watchdog_process.Stall(1, "old", "init", 0, 9.0, 1.0)
    (tmp_path / "stacks").mkdir()
    for process in (1, 2):
        file = tmp_path / "stacks" / f"process{process}.json"
        file.write_text(json.dumps(old_report._replace(process=process)._asdict()))
        os.utime(file, (time.time() - 60,) * 2)
    # Both enter their phases at the same moment, even if one starts late.
    folder = tmp_path
    start_file = tmp_path / "go"
    code_format = f"""
while not os.path.exists({str(start_file)!r}):
    time.sleep(0.01)
watchdog.phase(%r, 118)
time.sleep(1000)
"""
    step_trainer = start(code_format % "step", 0, 3, folder)
    data_trainer = start(code_format % "data", 1, 3, folder)
    start_file.touch()
    for trainer in (step_trainer, data_trainer):
        code, stderr = trainer.end()
        assert code == -signal.SIGABRT
        assert re.search(
            r"; behind: process 1 on host \S+ \(phase data, step 118\); "
            rf"not heard of: process 2\. Stacks: {folder}/stacks/",
            stderr,
        )


def test_an_earlier_step_or_phase_is_behind():
    def stall(process: int, phase: str, step: int) -> watchdog_process.Stall:
        return watchdog_process.Stall(process, "h", phase, step, 1.0, 1.0)

    describe = watchdog_process.behind
    leaders = [stall(0, "step", 9), stall(2, "step", 9)]
    text = describe([*leaders, stall(1, "step", 8)], 3)
    assert text == "process 1 on host h (phase step, step 8)"
    assert describe([*leaders, stall(1, "save", 9)], 3).startswith("process 1 ")
    assert describe([*leaders, stall(1, "log", 9)], 3).startswith("process 1 ")
    assert describe([stall(0, "eval", 9), stall(1, "save", 9)], 2).startswith(
        "process 0 "
    )
    assert describe([stall(0, "compile", 0), stall(1, "init", 0)], 2).startswith(
        "process 1 "
    )
    assert describe(leaders[:1], 1) == "none, all heard of are here"
    followers = [stall(k, "data", 9) for k in range(3, 15)]
    assert describe([*leaders, *followers], 16).endswith(
        "(phase data, step 9) and 4 more; not heard of: process 1, 15"
    )


def test_a_folder_that_cannot_be_written_to_leaves_the_stacks_on_stderr(
    start, tmp_path
):
    (tmp_path / "stacks").write_text("a file")
    # The folder is refused before the trainer can write its stacks.
    late_stacks = """
def wait():
    time.sleep(3.5)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGVTALRM])
    time.sleep(1000)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGVTALRM])
watchdog.phase('step')
wait()
"""
    trainer = start(f"import signal{late_stacks}")
    code, stderr = trainer.end()
    assert code == -signal.SIGABRT
    assert "stacks does not answer: FileExistsError" in stderr
    assert "in wait" in stderr


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
    code, stderr = trainer.end()
    # The signal is an exit code here, because nothing can signal that process.
    assert code == signal.SIGABRT
    assert "no progress" in stderr
    assert 'File "<string>"' in stacks_in(tmp_path)


def test_the_watcher_imports_only_the_standard_library():
    tree = ast.parse(Path(watchdog_process.__file__).read_text())
    for node in tree.body:
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in sys.stdlib_module_names
