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

from data.config import Count as Count
from data.config import DataConfig, RunSeed
from data.config import Number as Number
from train.config.bounds import Batches as Batches
from train.config.bounds import NotNegative as NotNegative
from train.config.bounds import Seconds as Seconds
from train.config.bounds import Step as Step
from train.config.machine import DistributedConfig as DistributedConfig
from train.config.machine import Platform as Platform
from train.config.machine import RuntimeConfig as RuntimeConfig
from train.config.machine import WatchdogConfig as WatchdogConfig
from train.config.mesh import MESH_AXES as MESH_AXES
from train.config.mesh import DcnConfig as DcnConfig
from train.config.mesh import MeshConfig as MeshConfig
from train.config.model import ModelSection
from train.config.monitoring import EvalConfig as EvalConfig
from train.config.monitoring import EvalSet as EvalSet
from train.config.monitoring import LogConfig as LogConfig
from train.config.monitoring import MlflowConfig as MlflowConfig
from train.config.monitoring import TensorBoardConfig as TensorBoardConfig
from train.config.monitoring import TraceConfig as TraceConfig
from train.config.monitoring import TrackerConfig as TrackerConfig
from train.config.monitoring import WandbConfig as WandbConfig
from train.config.optimizer import MomentDtype as MomentDtype
from train.config.optimizer import MuonScale as MuonScale
from train.config.optimizer import OptimizerConfig as OptimizerConfig
from train.config.optimizer import OptimizerName as OptimizerName
from train.config.optimizer import ParameterGroup as ParameterGroup
from train.config.optimizer import Transfer as Transfer
from train.config.run import CheckpointConfig as CheckpointConfig
from train.config.run import RunConfig as RunConfig
from train.config.schedule import BatchRule as BatchRule
from train.config.schedule import DecayShape as DecayShape
from train.config.schedule import Schedule as Schedule
from train.config.schedule import ScheduleConfig as ScheduleConfig
from train.config.schedule import SchedulePoint as SchedulePoint
from train.config.training import Remat as Remat
from train.config.training import TrainConfig as TrainConfig


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
