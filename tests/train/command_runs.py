"""Start each command in a process of its own, and read the files of its run."""

import inspect
import json
import subprocess
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import pytest
from etils import epath

from tests.forks import Forks
from tests.program import module_option, program_code
from train.resolve.program import make_program
from train.run.restore import SavedSteps
from train.run.starts import read_run

# A script: `python -m train` that sends itself a signal once it has logged AT_STEP.
SIGNALLED_TRAIN = """
import os
import time
from train.__main__ import main
from train.cli.command import Command, run_command
from train.run.directory import RunDir

write = RunDir.log

def write_and_signal(log, step, values):
    write(log, step, values)
    if step == int(os.environ["AT_STEP"]):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        time.sleep(0.2)  # A step takes less time than waking the thread of signals.

RunDir.log = write_and_signal

if __name__ == "__main__":
    run_command(Command(main))
"""

Result = subprocess.CompletedProcess[str]
RunCommand = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of the text and of the runs."""
    folder = tmp_path_factory.mktemp("runs")
    source = inspect.getsource(textwrap) + inspect.getsource(inspect)
    (folder / "text.txt").write_text(source[:40_000])
    (folder / "signalled.py").write_text(program_code(SIGNALLED_TRAIN))
    return folder


@pytest.fixture(scope="module")
def run_command(folder: Path, forks: Forks) -> RunCommand:
    """Run a command in a separate process, given its run directory and overrides."""
    tiny = (
        *("model.num_layers=2", "model.embed_dim=32", "model.num_heads=2"),
        *("model.compute_dtype=float32", "model.init=scaled", "optimizer=adamw"),
        *("data=text", f"data.path={folder}/text.txt", "data.sequence_length=32"),
        *("data.batch_size=8", f"data.cache_dir={folder}/data", "tracker=none"),
        *("runtime.cpu_devices=2", "schedule.warmup_steps=2", "train.num_steps=20"),
        *("checkpoint.save_interval_steps=5", "log.interval_steps=1"),
        "schedule.final_fraction=0.1",
    )

    def run(
        path: Path | str,
        overrides: Sequence[str] = (),
        at_step: int = 0,
        signal_number: int = 0,
        module: str = "train",
        config: tuple[str, ...] = tiny,
        fault: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Result:
        is_signalled = signal_number != 0
        program = (
            [str(folder / "signalled.py")] if is_signalled else module_option(module)
        )
        variables = {
            "AT_STEP": str(at_step),
            "SIGNAL": str(signal_number),
            "LONGHAUL_DRILL": fault,
        }
        words = [*program, f"run.dir={path}", *config, *overrides]
        if fault:
            words.append("runtime.allow_fault_injection=true")
        return forks.run(words, folder, variables | dict(environment or {}))

    return run


def lines(run: Path) -> list[dict]:
    return [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]


def steps(run: Path) -> list[dict]:
    """Return the values of each logged step that do not depend on the clock."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    return [{k: x[k] for k in keys} for x in lines(run) if "loss" in x]


def state_of(run: Path | epath.Path, step: int):
    config = read_run(str(run))
    program = make_program(config, jax.devices()[:2])
    saved = SavedSteps(epath.Path(run) / "checkpoints")
    return jax.device_get(saved.restore(program.state, step))
