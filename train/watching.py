"""The configuration of what one sees of a run: validation, logs, trackers, traces.

A part of `train/config.py`. None of its keys changes what is trained.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Gt

from data.config import Count, Number

Batches = Count | Literal[-1]  # -1: the whole validation split


@dataclass(frozen=True)
class EvalSet:
    """A text to evaluate on besides the validation split."""

    # A token store (what it holds out, or else all), or text, if data.path is text.
    path: str = ""


@dataclass(frozen=True)
class EvalConfig:
    """Validation during training."""

    interval_steps: Count = 500  # steps between evaluations
    num_batches: Batches = 16  # of each; -1: the whole validation split
    final_num_batches: Batches = -1  # likewise, of the last evaluation
    sets: dict[str, EvalSet] = field(default_factory=dict)  # by name: {code: {path: c}}
    by_source: bool = True  # of a mixture, score each source too
    # Tasks of lm-evaluation-harness (the extra eval) to judge by: [hellaswag, piqa].
    tasks: list[str] = field(default_factory=list)
    task_path: str | None = None  # a folder of task files of one's own
    task_interval_steps: Count = 2000  # steps between; and at the end
    # Examples of each task; below 1: this part of them; null: all.
    task_limit: Annotated[float, Gt(0)] | None = 100
    task_num_fewshot: Number | None = None  # shown first; null: as the task says

    @property
    def paths(self) -> dict[str, str]:
        """Return where the sets lie."""
        return {name: each.path for name, each in self.sets.items()}


@dataclass(frozen=True)
class LogConfig:
    """How often metrics are read from the device and written."""

    interval_steps: Count = 10  # steps between two lines of metrics.jsonl
    # Steps between figures of each layer: its activations, gradients and updates, and
    # what eight bits flush to zero or cut off; null: none.
    numerics_interval_steps: Count | None = None


@dataclass(frozen=True)
class WandbConfig:
    """W&B works offline unless asked otherwise."""

    enabled: bool = False  # tracker=wandb sets it
    project: str = "longhaul"  # of W&B
    mode: Literal["offline", "online"] = "offline"  # offline: only files, to sync later


@dataclass(frozen=True)
class TensorBoardConfig:
    """Event files in the run's directory."""

    enabled: bool = False  # tracker=tensorboard sets it


@dataclass(frozen=True)
class MlflowConfig:
    """A server, or files in the run's directory."""

    enabled: bool = False  # tracker=mlflow sets it
    uri: str | None = None  # of a server; null: $MLFLOW_TRACKING_URI, else files
    experiment: str = "longhaul"  # that the run is one of


@dataclass(frozen=True)
class TrackerConfig:
    """Where metrics go besides metrics.jsonl: tracker=[wandb,tensorboard]."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)


@dataclass(frozen=True)
class ProfileConfig:
    """Traces of jax.profiler."""

    # [first,last] traces these steps into <run.dir>/profiles/<first>.
    steps: list[Number] = field(default_factory=list)
