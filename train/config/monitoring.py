"""Validation, logs, trackers and traces.

None of these keys changes what is trained.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Gt
from typing_extensions import Doc

from data.config import Count, Number
from train.config.bounds import Batches

_DEFAULT_NUM_BATCHES = 16


@dataclass(frozen=True)
class EvalSet:
    """A text to evaluate on, in addition to the validation split."""

    path: Annotated[
        str,
        Doc(
            "A token store, whose validation split is used if it has one; or text, if "
            "data.path is text."
        ),
    ] = ""


@dataclass(frozen=True)
class EvalConfig:
    """Validation during training."""

    interval_steps: Annotated[
        Count, Doc("The number of steps between evaluations.")
    ] = 500
    num_batches: Annotated[
        Batches | None,
        Doc(
            "The number of batches of each set, which are spread evenly over the set "
            "and have the same rows at every step. -1 takes the whole set. null: 16, "
            "and the whole set after the last step."
        ),
    ] = None
    final_num_batches: Annotated[
        Batches | None,
        Doc(
            "The number after the last step. A number up to eval.num_batches adds "
            "nothing to it. null: eval.num_batches, or the whole set if that is null."
        ),
    ] = None
    sets: Annotated[
        dict[str, EvalSet],
        Doc("Further sets by name, such as {code: {path: stores/code}}."),
    ] = field(default_factory=dict)
    by_source: Annotated[
        bool, Doc("Each source of a mixture is also scored separately.")
    ] = True
    tasks: Annotated[
        list[str],
        Doc(
            "Tasks of lm-evaluation-harness (the extra `eval`) to score, such as "
            "[hellaswag,piqa]."
        ),
    ] = field(default_factory=list)
    task_path: Annotated[
        str | None, Doc("A folder with further task files. null has none.")
    ] = None
    task_interval_steps: Annotated[
        Count,
        Doc(
            "The number of steps between scores of tasks. The last step is scored too."
        ),
    ] = 2000
    task_limit: Annotated[
        Annotated[float, Gt(0)] | None,
        Doc(
            "The number of examples of each task, or below 1 the fraction of them. "
            "null takes all."
        ),
    ] = 100
    task_num_fewshot: Annotated[
        Number | None,
        Doc("The number of examples in each prompt. null: what the task says."),
    ] = None

    @property
    def num_training_batches(self) -> int:
        """Return the number of batches while training; -1 takes all."""
        return _DEFAULT_NUM_BATCHES if self.num_batches is None else self.num_batches

    @property
    def num_final_batches(self) -> int:
        """Return the number of batches after the last step; -1 takes all."""
        if self.final_num_batches is not None:
            return self.final_num_batches
        return -1 if self.num_batches is None else self.num_batches

    @property
    def paths(self) -> dict[str, str]:
        """Return the path of each set, by name."""
        return {name: eval_set.path for name, eval_set in self.sets.items()}


@dataclass(frozen=True)
class LogConfig:
    """How often metrics are read from the device and written."""

    interval_steps: Annotated[
        Count, Doc("The number of steps between two lines of metrics.jsonl.")
    ] = 10
    numerics_interval_steps: Annotated[
        Count | None,
        Doc(
            "The number of steps between statistics of each layer's activations, "
            "gradients and updates, and of what eight bits flush to zero or clip. null "
            "collects none."
        ),
    ] = None


@dataclass(frozen=True)
class WandbConfig:
    """Metrics in Weights & Biases (W&B), which is offline by default."""

    enabled: Annotated[bool, Doc("Write to W&B; tracker=wandb sets this.")] = False
    project: Annotated[str, Doc("The W&B project.")] = "longhaul"
    mode: Annotated[
        Literal["offline", "online"],
        Doc("offline only writes files, which `wandb sync` can upload later."),
    ] = "offline"


@dataclass(frozen=True)
class TensorBoardConfig:
    """Event files in the run's directory."""

    enabled: Annotated[
        bool, Doc("Write event files; tracker=tensorboard sets this.")
    ] = False


@dataclass(frozen=True)
class MlflowConfig:
    """An MLflow server, or files in the run's directory."""

    enabled: Annotated[bool, Doc("Write to MLflow; tracker=mlflow sets this.")] = False
    uri: Annotated[
        str | None,
        Doc(
            "The URI of a server. null means $MLFLOW_TRACKING_URI, or files in the "
            "run's directory if that is not set."
        ),
    ] = None
    experiment: Annotated[str, Doc("The MLflow experiment of the run.")] = "longhaul"


@dataclass(frozen=True)
class TrackerConfig:
    """Further destinations of metrics, such as tracker=[wandb,tensorboard]."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)


@dataclass(frozen=True)
class TraceConfig:
    """Traces of jax.profiler."""

    steps: Annotated[
        list[Number],
        Doc(
            "[first,last] traces these steps into <run.dir>/profiles/<first>. On GPUs, "
            "the whole run then launches each kernel separately, which names the "
            "kernels in the trace and costs 1 to 2 % of speed."
        ),
    ] = field(default_factory=list)
