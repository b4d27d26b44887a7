"""A run whose config.yaml or starts/ is gone: its checkpoints say what it is."""

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
from train.run.starts import checkpoint_metadata, read_run, record_start

SOURCES: Any = SimpleNamespace(fingerprints={"text": "abc"}, fingerprint="abc", path="")
FIRST = Config()
SECOND = replace(FIRST, data=replace(FIRST.data, skip_batches=[5, 8]))


def start(path: epath.Path, config: Config, number: int, step: int) -> str:
    """Record a start and save a checkpoint, as train/start.py does."""
    continuation = compare_with_run(path, config, SOURCES)
    data = replace(config.data, skip_batches=continuation.skip_batches)
    config = replace(config, data=data)
    length = continuation.schedule_steps
    record_start(path, config, SOURCES, number, length, continuation.run_id)
    folder = path / "checkpoints"
    keep = CheckpointConfig()
    checkpoints = Checkpoints(folder, keep, run_id=continuation.run_id)
    about = checkpoint_metadata(config, SOURCES, {}, length)
    checkpoints.save(step, make_state(step), about)
    checkpoints.close()
    return continuation.run_id


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory) -> epath.Path:
    """A run of two starts, the second of which left batches out."""
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
    """A copy of it in which one, the other or both are gone."""
    path = epath.Path(shutil.copytree(two_starts, tmp_path / "run"))
    for name in request.param:
        target = path / name
        target.rmtree() if target.is_dir() else target.unlink()
    return path


def refused(path: epath.Path, config: Config) -> list[str]:
    with pytest.raises(ConfigError) as error:
        compare_with_run(path, config, SOURCES)
    return [mistake.key for mistake in error.value.mistakes]


def test_a_start_that_would_make_another_run_of_it_is_refused(run):
    optimizer = replace(FIRST.optimizer, learning_rate=0.5)
    data = replace(FIRST.data, batch_size=3)
    assert refused(run, replace(FIRST, seed=7)) == ["seed"]
    assert refused(run, replace(FIRST, data=data)) == ["data.batch_size"]
    changed = replace(FIRST, optimizer=optimizer)
    assert refused(run, changed) == ["optimizer.learning_rate"]
    allowed = replace(FIRST.run, allow_change=["optimizer.learning_rate"])
    compare_with_run(run, replace(changed, run=allowed), SOURCES)


def test_batches_that_were_left_out_stay_so_and_it_is_the_same_run(run, two_starts):
    whole = compare_with_run(two_starts, FIRST, SOURCES)
    assert whole.earlier_skips == whole.skip_batches == [5, 8]
    assert compare_with_run(run, FIRST, SOURCES) == whole


def test_both_files_are_written_again(run, two_starts):
    run_id = start(run, FIRST, 3, 30)
    assert (run / "config.yaml").exists()
    written = read_run(str(run))
    assert written == replace(SECOND, run=replace(SECOND.run, dir=str(run)))
    again = compare_with_run(run, FIRST, SOURCES)
    assert (again.run_id, again.skip_batches) == (run_id, [5, 8])
    assert refused(run, replace(FIRST, seed=7)) == ["seed"]


def test_other_text_is_noticed(run):
    other: Any = SimpleNamespace(fingerprints={"text": "xyz"}, path="elsewhere")
    with pytest.raises(DataError, match="was abc, now xyz"):
        compare_with_run(run, FIRST, other)


def test_a_checkpoint_of_another_run_says_nothing(two_starts, tmp_path):
    """Its seed and what it left out are not this run's."""
    path = epath.Path(shutil.copytree(two_starts, tmp_path / "run"))
    (path / "config.yaml").unlink()
    other = replace(FIRST, seed=7, data=replace(FIRST.data, skip_batches=[1, 3]))
    start(epath.Path(tmp_path / "other"), other, 1, 40)
    (tmp_path / "other" / "checkpoints" / "40").rename(path / "checkpoints" / "40")
    assert compare_with_run(path, FIRST, SOURCES).skip_batches == [5, 8]
    (path / "starts").rmtree()  # then it cannot be told whose run this is
    assert refused(path, FIRST) == ["seed"]


def test_a_save_that_was_killed_hides_no_checkpoint(run):
    """On an object store it leaves a folder without a description."""
    (run / "checkpoints" / "999").mkdir()
    with pytest.raises(ConfigError) as error:
        compare_with_run(run, replace(SECOND, seed=1), SOURCES)
    assert [mistake.key for mistake in error.value.mistakes] == ["seed"]
