"""The checkpoints say which run it is if config.yaml or starts/ is gone."""

import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath

from tests.train.run.states import make_state
from train.config import CheckpointConfig, Config
from train.errors import ConfigError, DataError
from train.run.checkpoint import Checkpoints
from train.run.continuation import compare_with_run
from train.run.starts import read_run
from train.run.this_start import ThisStart

SOURCES: Any = SimpleNamespace(fingerprints={"text": "abc"}, fingerprint="abc", path="")
FIRST = Config()
SECOND = replace(FIRST, data=replace(FIRST.data, skip_batches=[5, 8]))


def start(path: epath.Path, config: Config, number: int, step: int) -> str:
    """Record a start and save a checkpoint, as train/start.py does."""
    continuation = compare_with_run(ThisStart(path, config, SOURCES))
    data = replace(config.data, skip_batches=continuation.skip_batches)
    config = replace(config, data=data)
    length = continuation.schedule_steps
    this_start = ThisStart(path, config, SOURCES)
    this_start.record(number, length, continuation.run_id)
    folder = path / "checkpoints"
    checkpoint_config = CheckpointConfig()
    checkpoints = Checkpoints(folder, checkpoint_config, run_id=continuation.run_id)
    metadata = this_start.checkpoint_metadata({}, length)
    checkpoints.save(step, make_state(step), metadata)
    checkpoints.close()
    return continuation.run_id


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory) -> epath.Path:
    """Return a run of two starts, of which the second skipped batches."""
    path = epath.Path(tmp_path_factory.mktemp("runs") / "run")
    run_id = start(path, FIRST, 1, 10)
    assert start(path, SECOND, 2, 20) == run_id
    return path


GONE = {
    "config.yaml": ["config.yaml"],
    "starts": ["starts"],
    "both": ["config.yaml", "starts"],
}


@pytest.fixture(params=GONE.values(), ids=[*GONE])
def run(request, two_starts, tmp_path) -> epath.Path:
    """Return a copy of the run without config.yaml, starts/ or both."""
    path = epath.Path(shutil.copytree(two_starts, tmp_path / "run"))
    for name in request.param:
        target = path / name
        target.rmtree() if target.is_dir() else target.unlink()
    return path


def refused_keys(path: epath.Path, config: Config) -> list[str]:
    with pytest.raises(ConfigError) as error:
        compare_with_run(ThisStart(path, config, SOURCES))
    return [mistake.key for mistake in error.value.mistakes]


def test_a_start_with_settings_of_another_run_is_refused(run):
    optimizer = replace(FIRST.optimizer, learning_rate=0.5)
    data = replace(FIRST.data, batch_size=3)
    assert refused_keys(run, replace(FIRST, seed=7)) == ["seed"]
    assert refused_keys(run, replace(FIRST, data=data)) == ["data.batch_size"]
    changed_config = replace(FIRST, optimizer=optimizer)
    assert refused_keys(run, changed_config) == ["optimizer.learning_rate"]
    run_config = replace(FIRST.run, allow_change=["optimizer.learning_rate"])
    compare_with_run(ThisStart(run, replace(changed_config, run=run_config), SOURCES))


def test_skipped_batches_stay_skipped_and_it_is_the_same_run(run, two_starts):
    continuation = compare_with_run(ThisStart(two_starts, FIRST, SOURCES))
    assert continuation.earlier_skips == continuation.skip_batches == [5, 8]
    assert compare_with_run(ThisStart(run, FIRST, SOURCES)) == continuation


def test_both_files_are_written_again(run, two_starts):
    run_id = start(run, FIRST, 3, 30)
    assert (run / "config.yaml").exists()
    config = read_run(str(run))
    assert config == replace(SECOND, run=replace(SECOND.run, dir=str(run)))
    continuation = compare_with_run(ThisStart(run, FIRST, SOURCES))
    assert (continuation.run_id, continuation.skip_batches) == (run_id, [5, 8])
    assert refused_keys(run, replace(FIRST, seed=7)) == ["seed"]


def test_changed_data_is_refused(run):
    other_sources: Any = SimpleNamespace(fingerprints={"text": "xyz"}, path="elsewhere")
    with pytest.raises(DataError, match="was abc, now xyz"):
        compare_with_run(ThisStart(run, FIRST, other_sources))


def test_a_checkpoint_of_another_run_is_ignored(two_starts, tmp_path):
    """Its seed and its skipped batches are not those of this run."""
    path = epath.Path(shutil.copytree(two_starts, tmp_path / "run"))
    (path / "config.yaml").unlink()
    other_config = replace(FIRST, seed=7, data=replace(FIRST.data, skip_batches=[1, 3]))
    start(epath.Path(tmp_path / "other"), other_config, 1, 40)
    (tmp_path / "other" / "checkpoints" / "40").rename(path / "checkpoints" / "40")
    assert compare_with_run(ThisStart(path, FIRST, SOURCES)).skip_batches == [5, 8]
    (path / "starts").rmtree()  # then nothing says which run this is
    assert refused_keys(path, FIRST) == ["seed"]


def test_a_save_that_was_killed_hides_no_checkpoint(run):
    """A killed save leaves a folder without metadata on an object store."""
    (run / "checkpoints" / "999").mkdir()
    with pytest.raises(ConfigError) as error:
        compare_with_run(ThisStart(run, replace(SECOND, seed=1), SOURCES))
    assert [mistake.key for mistake in error.value.mistakes] == ["seed"]
