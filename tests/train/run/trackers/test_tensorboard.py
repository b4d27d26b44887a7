from pathlib import Path

import pytest

from tests.train.run.trackers.sessions import begin, life
from train.config import TensorBoardConfig, TrackerConfig

pytest.importorskip("tensorboardX")
CONFIG = TrackerConfig(tensorboard=TensorBoardConfig(enabled=True))


def _read(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values of each tag as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_each_step_is_recorded_once_after_a_kill(tmp_path):
    life(CONFIG, tmp_path, "tensorboard")
    scalars = _read(tmp_path)
    assert [step for step, _ in scalars["loss"]] == list(range(1, 13))
    assert [step for step, _ in scalars["eval/loss"]] == [3, 6, 9, 12]
    assert scalars["loss"][3][1] == 0.25
    assert len(list((tmp_path / "tensorboard").glob("*tfevents*"))) == 3


def test_a_rewind_replaces_later_steps(tmp_path):
    begin(CONFIG, tmp_path, 1, 0, 6).finish()
    begin(CONFIG, tmp_path, 2, 2, 4).finish()
    rates = [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert _read(tmp_path)["learning_rate"] == rates
