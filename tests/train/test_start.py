"""One start of a run: what is decided before anything is opened."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fleet import REPOSITORY
from train.cli.command import compose
from train.core.program import settle
from train.distributed.processes import Cluster
from train.errors import CRASHES_AGAIN, Exit
from train.identity import run_dir
from train.preflight import settled_run_dir
from train.start import report_crash


def test_all_files_of_a_run_lie_in_one_directory():
    """Its default name depends on the vocabulary, which the tokenizer settles."""
    config = compose([])
    assert settled_run_dir(config) == run_dir(settle(config, vocab_size=384))
    assert settled_run_dir(config) != run_dir(config)


def test_where_the_data_is_missing_the_start_itself_says_so():
    config = compose(["data=tokens", "data.path=missing", "run.name=base"])
    assert settled_run_dir(config) == "runs/base"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_notice_while_jax_is_imported_is_a_preemption(tmp_path, number):
    """An import that takes for ever stands for it."""
    slow = "import time\nprint('importing', flush=True)\n"
    slow += "for _ in range(10**5): time.sleep(0.01)"  # one may miss a signal
    (tmp_path / "jax.py").write_text(slow)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    process = subprocess.Popen(
        [sys.executable, "-m", "train", f"run.dir={tmp_path}/run"],
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
    with pytest.raises(Exit, match=said) as raised:
        report_crash(RuntimeError("again"), run, Cluster(), preemption)  # pyright: ignore
    assert "step=-1" not in str(raised.value)
