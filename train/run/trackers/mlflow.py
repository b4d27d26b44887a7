"""Track a run with MLflow, on a server or in files under `<run_dir>/mlflow/`.

A run has one id, in `<run_dir>/mlflow/run_id`. Each start asks the tracker for the last
step of each metric, so that no step is sent twice.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.identity import leaves
from train.run.trackers.writer import Line, Writer

# The limits of one request.
_MAX_PARAMS = 100
_MAX_METRICS = 1000
_MAX_VALUE_LENGTH = 500  # every server accepts this length


class MlflowWriter(Writer):
    """A run of MLflow."""

    name = "mlflow"

    def open(self, folder: Path, marked: int) -> int:
        """Find the run, or create it with its config as parameters."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # Without this, MLflow refuses to write to files.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        # This hides a warning for each retry.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        uri = self._config.uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._metric: Any = Metric
        self._client = MlflowClient(uri or folder.as_uri())
        self._id = self._run.run_id(self.name, self._create)
        self._client.update_run(self._id, status="RUNNING")
        metrics = self._client.get_run(self._id).data.metrics
        # An earlier start may have been killed before it sent all parameters.
        if not metrics:
            self._log_params()
        self._last_steps = {key: self._last_step(key) for key in metrics}
        return marked if metrics else -1

    def _create(self) -> str:
        client = self._client
        name = self._config.experiment
        existing = client.get_experiment_by_name(name)
        experiment = (
            existing.experiment_id if existing else client.create_experiment(name)
        )
        return client.create_run(experiment, run_name=self._run.name).info.run_id

    def _log_params(self) -> None:
        from mlflow.entities import Param

        params = [
            Param(".".join(path), str(value)[:_MAX_VALUE_LENGTH])
            for path, value in leaves(self._run.config)
        ]
        for start in range(0, len(params), _MAX_PARAMS):
            batch = params[start : start + _MAX_PARAMS]
            self._client.log_batch(self._id, params=batch)

    def _last_step(self, key: str) -> int:
        history = self._client.get_metric_history(self._id, key)
        return max(metric.step for metric in history)

    def write(self, lines: Sequence[Line]) -> None:
        """Send the values that the tracker lacks, in as few requests as possible."""
        timestamp_ms = int(1000 * time.time())
        metrics = [
            self._metric(key, value, timestamp_ms, step)
            for step, values in lines
            for key, value in values.items()
            if step > self._last_steps.get(key, -1)
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics[start : start + _MAX_METRICS])

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id)
