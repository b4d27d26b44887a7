"""A branch continues a checkpoint of its trunk, which stays as it is."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from etils import epath

from data.catalog import text_store
from data.sources import open_sources
from tests.forks import Forks
from tests.program import module_option
from tests.train import command_runs
from tests.train.command_runs import Result, RunCommand, lines, state_of, steps
from train.branch import read_schema
from train.cli.compose import check_command_line
from train.cli.quoting import quote_text
from train.config import Config
from train.errors import ConfigError
from train.run.branch import begin_branch
from train.run.digests import SEAL, digests, find_damage
from train.run.starts import first_config, newest_start
from train.run.this_start import ThisStart

# Pytest finds the fixtures by these names.
folder = command_runs.folder
run_command = command_runs.run_command

LOSSES: dict[str, Callable[[epath.Path], object]] = {
    "gone": lambda path: (path / "branch.json").unlink(),
    "empty": lambda path: (path / "branch.json").write_text(""),
    "torn": lambda path: (path / "branch.json").write_text('{"run": '),
    "without a config": lambda path: (path / "branch.json").write_text(
        '{"run": "trunk", "step": 10}'
    ),
    "of other types": lambda path: (path / "branch.json").write_text('{"run": 3}'),
    "deep": lambda path: (path / "branch.json").write_text("[" * 100_000),
}
LEVEL = ("schedule=constant", "checkpoint.keep_every_steps=5")


@pytest.fixture(scope="module")
def trunk(folder: Path, run_command: RunCommand) -> Path:
    """Train twenty steps at a constant learning rate, with a checkpoint every five."""
    result = run_command(folder / "trunk", LEVEL)
    assert result.returncode == 0, result.stderr
    return folder / "trunk"


@pytest.fixture
def branch(trunk: Path, folder: Path, forks: Forks):
    """Start a branch with `python -m train.branch`, given a step and overrides."""

    def branch(step: int, overrides: Sequence[str] = (), fault: str = "") -> Result:
        words = [*module_option("train.branch"), f"from={trunk}@{step}", *overrides]
        words.append("runtime.allow_fault_injection=true")
        return forks.run(words, folder, {"LONGHAUL_DRILL": fault})

    return branch


@pytest.mark.slow
def test_a_branch_decays_and_an_unchanged_branch_equals_its_trunk(trunk, branch):
    """The branch that decays is interrupted, and the same command continues it."""
    digests_before = digests(epath.Path(trunk))
    unchanged = branch(10)
    assert unchanged.returncode == 0, unchanged.stderr
    assert "from step 10" in unchanged.stdout
    unchanged_run = trunk.parent / "trunk-10"
    assert steps(unchanged_run) == steps(trunk)
    jax.tree.map(
        np.testing.assert_array_equal, state_of(unchanged_run, 20), state_of(trunk, 20)
    )

    decay = ("train.num_steps=13", "schedule.name=wsd", "schedule.decay_steps=5")
    decay += ("schedule.final_fraction=0.5", "optimizer.weight_decay=0.2")
    crash = branch(5, decay, fault="crash:0:9")
    assert crash.returncode == 1, crash.stderr
    result = branch(5, decay)
    assert result.returncode == 0, result.stderr
    run = trunk.parent / "trunk-5"
    assert [line["step"] for line in steps(run)] == list(range(1, 14))
    assert steps(run)[:5] == steps(trunk)[:5]
    factors = [line["learning_rate"] / 1e-3 for line in steps(run)]
    assert factors[7:] == pytest.approx([1, 1, 0.9, 0.8, 0.7, 0.6], rel=1e-6)
    assert lines(run)[-1]["eval_whole/loss"]

    record = json.loads((run / "branch.json").read_text())
    trunk_id = newest_start(epath.Path(trunk))["run_id"]
    assert record.pop("config")
    assert record == {"run": str(trunk), "run_id": trunk_id, "step": 5}
    assert newest_start(epath.Path(run))["run_id"] != trunk_id
    assert digests(epath.Path(trunk)) == digests_before


def test_a_step_without_a_checkpoint_is_refused_with_those_that_exist(trunk, branch):
    result = branch(7)
    assert result.returncode == 78
    assert f"from = {trunk}@7\n" in result.stderr
    assert "[5, 10, 15, 20]" in result.stderr


@pytest.mark.parametrize("words", [(), ("from=a",), ("from=a@5", "from=b@5")])
def test_a_branch_needs_one_trunk(words):
    with pytest.raises(ConfigError, match="from=<directory of a run>@<step>"):
        read_schema([*words])
    with pytest.raises(ConfigError, match="one by one"):
        read_schema(["--multirun", *words])


@pytest.mark.parametrize("words", [("--help",), ("--cfg", "schema"), ("--cfg=schema",)])
def test_the_keys_are_shown_without_a_trunk(words):
    assert read_schema([*words]) == (Config, [*words])


@pytest.fixture
def begin(trunk: Path, tmp_path: Path):
    """Begin a branch of the trunk in an empty folder, given overrides."""

    def begin(*overrides: str, step: int = 10) -> epath.Path:
        schema, words = read_schema([f"from={trunk}@{step}", *overrides])
        words = quote_text(words, schema)
        config = check_command_line(words, "branch", schema).plain()
        path = epath.Path(tmp_path / "run")
        sources = open_sources(config.data, text_store)
        checkpoint = epath.Path(trunk) / "checkpoints" / str(step)
        begin_branch(checkpoint, ThisStart(path, config, sources), lambda: None)
        return path

    return begin


def test_a_change_of_model_data_or_earlier_batches_is_refused(begin, tmp_path):
    changes = (
        *("model.init=gpt2", "seed=3", "data.batch_size=16", "optimizer.b1=0.8"),
        *("data.batch_schedule=[{from_step: 9, rows: 16}]", "data.skip_batches=[4,5]"),
    )
    for change in changes:
        with pytest.raises(ConfigError, match="differs from the run in") as error:
            begin(change)
        assert error.value.mistakes[0].key == change.partition("=")[0]
    with pytest.raises(ConfigError, match="must be above 10"):
        begin("train.num_steps=10", "schedule.warmup_steps=1")
    assert not (tmp_path / "run").exists()


def test_later_batches_and_permitted_keys_may_change(begin):
    path = begin(
        *("data.batch_schedule=[{from_step: 10, rows: 16}]", "optimizer.b1=0.8"),
        *("data.skip_batches=[10,11]", "run.allow_change=[optimizer.b1]"),
    )
    config = first_config(path)
    assert config is not None
    assert (config.optimizer.b1, config.data.skip_batches) == (0.8, [10, 11])
    assert find_damage(path / "checkpoints" / "10") is None


def test_a_jump_of_the_learning_rate_is_a_warning(begin, caplog):
    """Step 10 of 12 is inside the decay: two of its five steps are left."""
    begin("schedule.name=wsd", "schedule.decay_steps=5", "train.num_steps=12")
    (record,) = caplog.records
    assert "step 10: it has 46% of the peak, and 100% in the trunk" in record.message


def test_a_branch_without_a_jump_is_silent(begin, caplog):
    begin("schedule.name=wsd", "schedule.decay_steps=5", "train.num_steps=15")
    assert not caplog.records


def test_a_branch_whose_copying_was_interrupted_begins_again(begin):
    path = begin()
    step = path / "checkpoints" / "10"
    identity = newest_start(path)["run_id"]
    begin()
    assert newest_start(path)["run_id"] == identity, "it had begun"
    (step / SEAL).unlink()
    (step / "state" / "_METADATA").unlink()
    begin()
    assert find_damage(step) is None
    assert newest_start(path)["run_id"] != identity


def test_the_directory_of_another_run_or_branch_is_refused(begin, trunk):
    path = begin()
    for lose in LOSSES.values():
        with pytest.raises(ConfigError, match="is not a branch of"):
            begin(step=15)
        lose(path)
    shutil.rmtree(path)
    shutil.copytree(trunk, path)
    with pytest.raises(ConfigError, match="is not a branch of"):
        begin()


@pytest.mark.parametrize("lose", LOSSES.values(), ids=[*LOSSES])
def test_a_branch_whose_record_is_lost_is_known_by_its_checkpoint(begin, lose):
    path = begin()
    record = (path / "branch.json").read_text()
    lose(path)
    begin()
    assert (path / "branch.json").read_text() == record


def change_config(trunk: Path) -> None:
    for file in (trunk / "config.yaml", *trunk.glob("starts/*.yaml")):
        file.write_text(file.read_text().replace("seed: 0", "seed: 1"))
    start = yaml.safe_load((trunk / "starts/1.yaml").read_text())
    start["changes"] = {"optimizer.learning_rate": 0.5, "data.skip_batches": [3, 4]}
    (trunk / "starts/2.yaml").write_text(yaml.safe_dump(start))


def become_another_run(trunk: Path) -> None:
    """Change the records of a trunk into those of another run of the same name."""
    start = yaml.safe_load((trunk / "starts/1.yaml").read_text())
    start |= {"run_id": "another", "changes": {"seed": 7}}
    (trunk / "starts/1.yaml").write_text(yaml.safe_dump(start))


FATES: dict[str, Callable[[Path], object]] = {
    "changed": change_config,
    "deleted": shutil.rmtree,
    "moved": lambda trunk: trunk.rename(trunk.with_name("elsewhere")),
    "without checkpoints": lambda trunk: shutil.rmtree(trunk / "checkpoints"),
    "without a config": lambda trunk: (trunk / "config.yaml").unlink(),
    "damaged": lambda trunk: (trunk / "config.yaml").write_text("["),
    "another run": become_another_run,
}


@pytest.mark.parametrize(
    ("fate", "lost"),
    [
        *(("changed", None), ("deleted", None), ("another run", None)),
        ("deleted", "torn"),
        *(
            pytest.param(fate, None, marks=pytest.mark.slow)
            for fate in ("moved", "without checkpoints", "without a config", "damaged")
        ),
        *(
            pytest.param("deleted", lost, marks=pytest.mark.slow)
            for lost in LOSSES
            if lost != "torn"
        ),
    ],
)
def test_a_branch_reads_its_trunk_once(trunk, tmp_path, fate, lost):
    """The config of a branch stays the same, whatever happens later to its trunk."""
    copy = Path(shutil.copytree(trunk, tmp_path / "trunk"))
    words = [f"from={copy}@10", "schedule.final_fraction=0.3", "run.name=branch"]

    def read_config() -> Config:
        schema, overrides = read_schema(words)
        overrides = quote_text(overrides, schema)
        return check_command_line(overrides, "branch", schema).plain()

    config = read_config()
    path = epath.Path(tmp_path / "branch")
    step = epath.Path(copy) / "checkpoints/10"
    start = ThisStart(path, config, open_sources(config.data, text_store))
    begin_branch(step, start, lambda: None)
    if lost:
        LOSSES[lost](path)
    FATES[fate](copy)
    assert read_config() == config
    begin_branch(step, start, lambda: None)


def test_text_that_reads_the_environment_stays_text(trunk, tmp_path, monkeypatch):
    """Someone else may have written the trunk's config."""
    monkeypatch.setenv("PLAIN", "value")
    copy = Path(shutil.copytree(trunk, tmp_path / "copy"))
    file = copy / "config.yaml"
    file.write_text(file.read_text().replace("project: ", "project: ${oc.env:PLAIN} #"))
    schema, words = read_schema([f"from={copy}@10"])
    config = check_command_line(words, "branch", schema)
    assert config.tracker.wandb.project == "${oc.env:PLAIN}"
