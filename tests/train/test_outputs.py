"""An output that cannot be written is refused with its key, by every command."""

import os
import shutil
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.program import module_option
from tests.train import command_runs
from tests.train.command_runs import RunCommand
from train.errors import writing

# Pytest finds the fixtures by these names.
folder = command_runs.folder
run_command = command_runs.run_command

SMALL = ("model.num_layers=1", "model.embed_dim=32", "model.num_heads=2")
COMMANDS = {
    "train.plan": ("target=v5e-8", "mesh=fsdp", *SMALL),
    "train.coordinates": ("widths=[32,64]", "depths=[1,2]", "steps=1", *SMALL),
    "train.report": ("runs=[{run},{other}]",),
    "train.sample": ("run.dir={run}", "prompt=def", "num_tokens=2"),
    "train.export": ("run.dir={run}",),
    "data.train_tokenizer": ("input={text}", "vocab_size=300"),
    "launch": (
        "cluster=local",
        "action=render",
        "data.path={text}",
        "data=text",
        *SMALL,
    ),
}


@pytest.fixture(scope="module")
def words(folder: Path, run_command: RunCommand) -> dict[str, Path]:
    run = folder / "run"
    other_run = folder / "other"
    overrides = ("model=plain", "model.num_layers=1", "train.num_steps=2")
    result = run_command(run, [*overrides, "checkpoint.save_interval_steps=2"])
    assert result.returncode == 0, result.stderr
    shutil.copytree(run, other_run)
    (folder / "file").write_text("")
    os.mkfifo(folder / "pipe")
    return {"run": run, "other": other_run, "text": folder / "text.txt"}


@pytest.mark.slow
def test_a_pipe_is_refused_as_a_file_of_samples(words, folder, forks: Forks):
    """Opening it would wait until another process reads it."""
    arguments = [word.format(**words) for word in COMMANDS["train.sample"]]
    output = f"output={folder}/pipe"
    result = forks.run([*module_option("train.sample"), *arguments, output], folder)
    assert result.returncode == 78
    assert "pipe is not a regular file" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_below_a_file_is_refused(words, folder, forks: Forks, command):
    arguments = [word.format(**words) for word in COMMANDS[command]]
    output = folder / "file" / "output"
    result = forks.run(
        [*module_option(command), *arguments, f"output={output}"], folder
    )
    assert result.returncode in (65, 78), result.stderr
    assert "Traceback" not in result.stderr
    assert "output" in result.stderr
    assert "trained  " not in result.stdout  # no model was, in vain
    assert str(folder / "file") in result.stderr


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError, TimeoutError])
def test_a_broken_connection_is_no_mistake_of_the_config(error):
    with pytest.raises(error), writing("output", "s3://bucket/page.html"):
        raise error
