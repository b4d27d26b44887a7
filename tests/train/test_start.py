"""A start finds its directory, heeds early signals and reports a crash."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fleet import REPOSITORY
from tests.program import module_option
from train.cli.command import compose
from train.distributed.processes import Cluster
from train.errors import CRASHES_AGAIN, Exit
from train.identity import run_dir
from train.preflight import settled_run_dir
from train.resolve.program import settle
from train.start import report_crash


def test_all_files_of_a_run_lie_in_one_directory():
    """Its default name depends on the vocabulary, which the tokenizer settles."""
    config = compose([])
    assert settled_run_dir(config) == run_dir(settle(config, vocab_size=384))
    assert settled_run_dir(config) != run_dir(config)


def test_missing_data_does_not_hide_the_run_directory():
    config = compose(["data=tokens", "data.path=missing", "run.name=base"])
    assert settled_run_dir(config) == "runs/base"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_while_jax_is_imported_is_a_preemption(tmp_path, number):
    """A module that takes for ever to import stands for JAX."""
    slow_module = "import time\nprint('importing', flush=True)\n"
    # One long sleep may miss a signal.
    slow_module += "for _ in range(10**5): time.sleep(0.01)"
    (tmp_path / "jax.py").write_text(slow_module)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    process = subprocess.Popen(
        [sys.executable, *module_option("train"), f"run.dir={tmp_path}/run"],
        **{"env": {**os.environ, **path}, "cwd": tmp_path},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert "importing" in process.stdout.readline()
        process.send_signal(number)
        assert process.wait() == 42


@pytest.mark.parametrize(
    ("step", "said"),
    [(-1, "crashed before its first step for"), (7, "inspect run.dir=here step=7")],
)
def test_a_third_crash_names_a_batch_if_there_was_one(step, said):
    run = SimpleNamespace(judge_crash=lambda crash: CRASHES_AGAIN, path="here")
    preemption: Any = SimpleNamespace(step=step)
    with pytest.raises(Exit, match=said) as exit_error:
        report_crash(RuntimeError("again"), run, Cluster(), preemption)  # pyright: ignore
    assert "step=-1" not in str(exit_error.value)
