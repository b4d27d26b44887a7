"""A run that has trained and lost its checkpoints does not start over, in any way."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.program import module_option
from tests.train import command_runs
from tests.train.command_runs import RunCommand, lines
from train.run.digests import SEAL

# Pytest finds the fixtures by these names.
folder = command_runs.folder
run_command = command_runs.run_command

SHORT = ("schedule=constant", "train.num_steps=4", "checkpoint.save_interval_steps=2")
LONGER = (*SHORT, "train.num_steps=6")


def for_each_step(change: Callable[[Path], object]) -> Callable[[Path], object]:
    def change_all(checkpoints: Path) -> None:
        for step in [path for path in checkpoints.iterdir() if path.name.isdigit()]:
            change(step)

    return change_all


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def set_aside(step: Path) -> None:
    (step.parent / "quarantine").mkdir(exist_ok=True)
    step.rename(step.parent / "quarantine" / f"{step.name}-1")


def replace_by_link(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to("nowhere")


def replace_by_file(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.write_text("")


def flip(step: Path) -> None:
    file = max(step.glob("state/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


WAYS: dict[str, Callable[[Path], object]] = {
    "the folder is gone": shutil.rmtree,
    "the folder is empty": empty,
    "the folder is a link to nothing": replace_by_link,
    "the folder is a file": replace_by_file,
    "the steps are gone": for_each_step(shutil.rmtree),
    "the steps are emptied": for_each_step(empty),
    "the steps are links to nothing": for_each_step(replace_by_link),
    "the steps are damaged": for_each_step(flip),
    "the steps have no seal": for_each_step(lambda step: (step / SEAL).unlink()),
    "the steps are set aside": for_each_step(set_aside),
    "the steps have other names": for_each_step(
        lambda step: step.rename(step.with_name(f"old-{step.name}"))
    ),
}


@pytest.fixture(scope="module")
def trained(folder: Path, run_command: RunCommand) -> Path:
    result = run_command(folder / "trained", SHORT)
    assert result.returncode == 0, result.stderr
    return folder / "trained"


def check_refusal(run: Path, start: Callable[[], command_runs.Result]) -> str:
    """Start a run twice, check that nothing is trained, and return the last message."""
    metrics = (run / "metrics.jsonl").read_bytes()
    for _ in range(2):
        result = start()
        assert result.returncode == 65, result.stderr
        assert "Traceback" not in result.stderr
        assert (run / "metrics.jsonl").read_bytes() == metrics
    return result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_longer_run_is_refused(trained, run_command, way):
    run = Path(shutil.copytree(trained, trained.parent / "copy"))
    try:
        WAYS[way](run / "checkpoints")
        assert str(run) in check_refusal(run, lambda: run_command(run, LONGER))
    finally:
        shutil.rmtree(run)


@pytest.mark.slow
def test_the_error_names_a_remedy_and_the_run_resumes_from_a_copy(trained, run_command):
    run = Path(shutil.copytree(trained, trained.parent / "again"))
    (run / "checkpoints").rename(run / "copy")
    message = check_refusal(run, lambda: run_command(run, LONGER))
    assert "its results.json has the score of step 4" in message
    assert "Put the checkpoints back" in message
    shutil.rmtree(run / "checkpoints")
    (run / "copy").rename(run / "checkpoints")
    result = run_command(run, LONGER)
    assert "from step 4\n" in result.stdout, result.stderr
    assert [line["step"] for line in lines(run) if "loss" in line] == [*range(1, 7)]


@pytest.mark.slow
def test_a_run_with_initial_weights_does_not_begin_again_with_them(
    trained, run_command
):
    run = trained.parent / "begun"
    initial_weights = f"init_from={trained}"
    assert run_command(run, [*SHORT, initial_weights]).returncode == 0
    shutil.rmtree(run / "checkpoints")
    assert "score of step 4" in check_refusal(
        run, lambda: run_command(run, [*LONGER, initial_weights])
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["the folder is gone", "the steps are emptied"])
def test_a_branch_is_refused_with_its_trunk_named(trained, folder, forks: Forks, way):
    run = folder / "branch"
    words = [*module_option("train.branch"), f"from={trained}@2", "run.name=branch"]
    try:
        assert forks.run(words, folder, {}).returncode == 0
        WAYS[way](run / "checkpoints")
        message = check_refusal(
            run, lambda: forks.run([*words, "train.num_steps=6"], folder, {})
        )
        names_trunk = f"from={trained}@2" in message
        assert names_trunk == (way == "the folder is gone")
    finally:
        shutil.rmtree(run)


@pytest.mark.slow
def test_a_run_that_crashed_before_its_first_save_begins_again(folder, run_command):
    run = folder / "crashed"
    words = (*SHORT, "checkpoint.save_interval_steps=3")
    assert run_command(run, words, fault="crash:0:2").returncode == 1
    assert [line["step"] for line in lines(run)] == [1]
    assert run_command(run, words).returncode == 0
    assert [line["step"] for line in lines(run) if "loss" in line] == [1, 2, 3, 4]
