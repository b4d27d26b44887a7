"""The configuration of training as frozen dataclasses, one module for each topic.

Types, defaults, bounds and meanings are declared here, once. The YAML files under
`configs/` hold the presets, and docs/reference/config.md lists every key. A function
that needs one section takes that section as an argument. A function that prepares or
describes a run takes `Config`. Rules between keys are in `train/cli/rules.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Self

from typing_extensions import Doc

from data.config import Count, DataConfig, Number, RunSeed
from train.config.bounds import Batches, NotNegative, Seconds, Step
from train.config.machine import (
    DistributedConfig,
    Platform,
    RuntimeConfig,
    WatchdogConfig,
)
from train.config.mesh import MESH_AXES, DcnConfig, MeshConfig
from train.config.model import ModelSection
from train.config.monitoring import (
    EvalConfig,
    EvalSet,
    LogConfig,
    MlflowConfig,
    TensorBoardConfig,
    TraceConfig,
    TrackerConfig,
    WandbConfig,
)
from train.config.optimizer import (
    MomentDtype,
    MuonScale,
    OptimizerConfig,
    OptimizerName,
    ParameterGroup,
    Transfer,
)
from train.config.run import CheckpointConfig, RunConfig
from train.config.schedule import (
    BatchRule,
    DecayShape,
    Schedule,
    ScheduleConfig,
    SchedulePoint,
)
from train.config.training import Remat, TrainConfig

__all__ = [
    "MESH_AXES",
    "BatchRule",
    "Batches",
    "CheckpointConfig",
    "Config",
    "Count",
    "DcnConfig",
    "DecayShape",
    "DistributedConfig",
    "EvalConfig",
    "EvalSet",
    "LayoutConfig",
    "LogConfig",
    "MeshConfig",
    "MlflowConfig",
    "MomentDtype",
    "MuonScale",
    "NotNegative",
    "Number",
    "OptimizerConfig",
    "OptimizerName",
    "ParameterGroup",
    "Platform",
    "Remat",
    "RunConfig",
    "RuntimeConfig",
    "Schedule",
    "ScheduleConfig",
    "SchedulePoint",
    "Seconds",
    "Step",
    "TensorBoardConfig",
    "TraceConfig",
    "TrackerConfig",
    "TrainConfig",
    "Transfer",
    "WandbConfig",
    "WatchdogConfig",
]


@dataclass(frozen=True)
class LayoutConfig:
    """The part of the layout that `python -m train.plan` shows."""

    array: Annotated[
        str | None,
        Doc("The name of a parameter: show which device holds which slice of it."),
    ] = None


@dataclass(frozen=True)
class Config:
    """All keys of `python -m train`."""

    seed: Annotated[
        RunSeed, Doc("The seed of the weights, the order of the data, and sampling.")
    ] = 0
    init_from: Annotated[
        str | None,
        Doc(
            "A folder written by transformers or train.export, or the directory of "
            "another run. Its weights are those of step 0. null initialises them."
        ),
    ] = None
    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    profile: TraceConfig = field(default_factory=TraceConfig)
    plan: LayoutConfig = field(default_factory=LayoutConfig)

    def plain(self) -> "Config":
        """Return a plain `Config` with the same keys of training."""
        return Config(**{key.name: getattr(self, key.name) for key in fields(Config)})

    def defaults(self) -> "Config":
        """Return the default of each key, with the keys of parts that were added."""
        types = {key.name: type(getattr(self, key.name)) for key in fields(Config)}
        return Config(**{n: make() for n, make in types.items() if is_dataclass(make)})

    def with_values(self, changes: Mapping[str, Any]) -> Self:
        """Return this config with other values of keys such as `model.embed_dim`."""
        config = self
        for key, value in changes.items():
            config = _with_value(config, key, value)
        return config


def _with_value(section: Any, key: str, value: object) -> Any:
    """Return a section with another value of a key, or of a key in a section of it."""
    name, _, inner_key = key.partition(".")
    if inner_key:
        value = _with_value(getattr(section, name), inner_key, value)
    return replace(section, **{name: value})
