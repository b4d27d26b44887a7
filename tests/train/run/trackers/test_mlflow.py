from pathlib import Path

import pytest

from tests.train.run.trackers.sessions import begin, life
from train.config import MlflowConfig, TrackerConfig

CONFIG = TrackerConfig(mlflow=MlflowConfig(enabled=True))


@pytest.fixture(autouse=True)
def _no_server(monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "true")


def _steps(run_dir: Path, key: str) -> list[int]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run_dir / "mlflow").as_uri())
    run_id = (run_dir / "mlflow/run_id").read_text().strip()
    return [metric.step for metric in client.get_metric_history(run_id, key)]


def test_each_step_is_recorded_once_in_one_run_after_a_kill(tmp_path):
    from mlflow.tracking import MlflowClient

    life(CONFIG, tmp_path, "mlflow")
    assert _steps(tmp_path, "loss") == list(range(1, 13))
    assert _steps(tmp_path, "eval/loss") == [3, 6, 9, 12]
    client = MlflowClient((tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("longhaul")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"model.num_layers": "2", "seed": "0"}
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    assert run.data.metrics["loss"] == 1 / 12


def test_a_line_that_a_kill_lost_is_written_by_the_next_start(tmp_path):
    begin(CONFIG, tmp_path, 1, 0, 3).finish()
    (tmp_path / "mlflow/last_step").write_text("1")
    for file in (tmp_path / "mlflow").rglob("metrics/loss"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    begin(CONFIG, tmp_path, 2, 3, 4).finish()
    assert _steps(tmp_path, "eval/loss") == [3]
    assert _steps(tmp_path, "loss") == [1, 2, 3, 4]
