"""The whole configuration as frozen dataclasses.

Defaults stand here, once; the YAML files under `configs/` hold what a preset
changes. Everything below `train/` takes the dataclass it needs, never all of it.
What values are allowed stands in `train/cli/rules.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from data.config import DataConfig
from model.config import ModelConfig

# Marks the field of a table, empty by default, that takes any entry.
OPEN: Mapping[str, bool] = MappingProxyType({"open": True})


class Platform(StrEnum):
    """`auto` leaves the choice to JAX: TPU, else GPU, else CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    tpu = "tpu"


class Optimizer(StrEnum):
    """`muon` is for matrices; everything else gets AdamW beside it."""

    adamw = "adamw"
    muon = "muon"


class Schedule(StrEnum):
    """Shape of the learning rate after the warm-up."""

    constant = "constant"
    cosine = "cosine"
    wsd = "wsd"


class Remat(StrEnum):
    """What the backward pass recomputes: nothing, all but matrix products, all."""

    none = "none"
    dots = "dots"
    full = "full"


class Tracker(StrEnum):
    """Where metrics go besides metrics.jsonl."""

    none = "none"
    wandb = "wandb"


@dataclass(frozen=True)
class RunConfig:
    """A run is a directory."""

    name: str | None = None  # null: model-data-hash of what makes the run itself
    dir: str | None = None  # null: runs/<name>
    allow_change: list[str] = field(default_factory=list)
    rewind_to: int | None = None  # go on from the newest checkpoint up to this step
    lease_interval_s: float = 2.0  # the owner says this often that it is alive
    lease_timeout_s: float = 20.0  # an owner that was silent this long is dead


@dataclass(frozen=True)
class RuntimeConfig:
    """The machine."""

    platform: Platform = Platform.auto
    cpu_devices: int | None = None  # null: the CPU's cores, up to two
    deterministic: bool = False  # GPU: reproducible to the bit, slower
    # A folder; null: $JAX_COMPILATION_CACHE_DIR, or ~/.cache/longhaul/xla.
    compilation_cache: str | None = None


@dataclass(frozen=True)
class DistributedConfig:
    """The processes of a run: null is what the cluster's own variables say.

    Under Slurm, Open MPI, GKE, Cloud TPU VMs and Kubernetes JAX finds them; elsewhere
    torchrun's variables, SkyPilot's, or these keys tell (distributed/detection.py).
    """

    coordinator_address: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None
    init_timeout_s: int = 300  # for all processes to arrive
    heartbeat_timeout_s: int = 60  # a process that is silent this long is lost
    barrier_timeout_s: int = 300  # for all processes to say what one must know


@dataclass(frozen=True)
class WatchdogConfig:
    """How long each phase may take before the process is aborted, exit code 134."""

    enabled: bool = True
    init_timeout_s: float = 900.0
    compile_timeout_s: float = 3600.0
    restore_timeout_s: float = 3600.0
    step_timeout_s: float = 300.0  # at least, between two steps
    step_timeout_factor: float = 20.0  # times what log.interval_steps take at present
    eval_timeout_s: float = 1800.0
    save_timeout_s: float = 1800.0


@dataclass(frozen=True)
class DcnConfig:
    """Factor of each mesh axis that crosses slices or hosts."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes (one may be -1: what is left) and the two rule tables.

    A table maps a logical axis to a mesh axis, a list of them, or null (replicated).
    """

    data: int = 1
    fsdp: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    planned: bool = False  # take sizes, remat and microbatches from a search
    dcn: DcnConfig = field(default_factory=DcnConfig)
    params: dict[str, Any] = field(default_factory=dict)
    activations: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or Muon for the matrices with AdamW for the rest."""

    name: Optimizer = Optimizer.adamw
    learning_rate: float = 1e-3  # AdamW's
    weight_decay: float = 0.1  # of matrices and embeddings only, times the rate
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float | None = 1.0  # global norm of the gradient
    ema_decay: float | None = None  # average of weights, used by evaluation
    muon_learning_rate: float = 0.02
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.0


@dataclass(frozen=True)
class ScheduleConfig:
    """The factor on every learning rate, as a function of the step."""

    name: Schedule = Schedule.cosine
    warmup_steps: int = 100
    decay_steps: int | None = None  # wsd: length of the last part; null: 30 %
    final_fraction: float = 0.1  # of the peak, at the end


@dataclass(frozen=True)
class TrainConfig:
    """The loop and the step."""

    num_steps: int = 1600
    accumulation_steps: int = 1  # microbatches of one step
    max_skipped_steps: int = 10  # left out in a row before exit 3
    skip_sigma: float | None = None  # leave out steps this far above the recent ones
    skip_window: int = 128  # steps that count as recent
    replica_check_interval_steps: int | None = 500  # compare copies of the state
    remat: Remat = Remat.none
    loss_chunk_tokens: int | None = None  # positions whose logits exist at once
    z_loss: float = 0.0


@dataclass(frozen=True)
class EvalConfig:
    """Validation during training."""

    interval_steps: int = 500
    num_batches: int = 16  # -1: the whole validation split
    final_num_batches: int = -1  # likewise, of the last evaluation


@dataclass(frozen=True)
class LogConfig:
    """How often metrics are read from the device and written."""

    interval_steps: int = 10


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    save_interval_steps: int = 500
    save_interval_minutes: float = 10.0
    keep_latest: int = 2
    keep_every_steps: int | None = None  # these are kept for good
    max_failed_saves: int = 3  # in a row before the run ends


@dataclass(frozen=True)
class TrackerConfig:
    """W&B works offline unless asked otherwise."""

    name: Tracker = Tracker.wandb
    project: str = "longhaul"
    mode: str = "offline"  # offline or online


@dataclass(frozen=True)
class ProfileConfig:
    """`steps=[first,last]` writes a jax.profiler trace to <run.dir>/profile."""

    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LayoutConfig:
    """What `python -m train.plan` shows of the layout."""

    array: str | None = None  # a parameter: show which device holds which slice


@dataclass(frozen=True)
class Config:
    """Everything `python -m train` can be told."""

    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    plan: LayoutConfig = field(default_factory=LayoutConfig)


@dataclass(frozen=True)
class EvaluateConfig:
    """Keys of `python -m train.evaluate`; the rest is the run's own config.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    step: int | None = None  # of the checkpoint; null: the newest
    num_batches: int = -1  # -1: the whole validation split
    batch_size: int | None = None  # null: the run's


@dataclass(frozen=True)
class SampleConfig:
    """Keys of `python -m train.sample`; the rest is the run's own config.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    step: int | None = None  # of the checkpoint; null: the newest
    prompt: str = ""
    num_tokens: int = 256
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int | None = None  # draw from the k likeliest tokens only
    top_p: float | None = None  # ... from the likeliest that make up this mass
    num_samples: int = 1
    seed: int = 0


@dataclass(frozen=True)
class CheckpointsConfig:
    """Keys of `python -m train.checkpoints`."""

    run: RunConfig = field(default_factory=RunConfig)
    verify: bool = True  # read and hash every file; false: only list


@dataclass(frozen=True)
class StatusConfig:
    """Keys of `python -m train.status`."""

    run: RunConfig = field(default_factory=RunConfig)
    json: bool = False  # print one JSON object, for programs
