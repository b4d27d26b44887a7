"""The whole configuration as frozen dataclasses.

Defaults, bounds and meanings stand here, once; the YAML files under `configs/` hold
what a preset changes, docs/config.md lists it all. Everything below `train/` takes the
dataclass it needs, never all of it. Rules between keys stand in `train/cli/rules.py`.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import inf
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from data.config import DataConfig, RunSeed
from model.choices import ContextAttention, Dtype, ExpertExchange
from model.config import Intermediate, ModelConfig, OffloadName
from train.watching import (
    Count,
    EvalConfig,
    LogConfig,
    Number,
    ProfileConfig,
    TrackerConfig,
)

Positive = Annotated[float, Gt(0), Lt(inf)]
NotNegative = Annotated[float, Ge(0), Lt(inf)]
Seconds = Annotated[float, Gt(0)]
Step = Number | Literal["best"]  # best: lowest validation loss
AxisSize = Count | Literal[-1]  # -1: what is left of the devices


class Platform(StrEnum):
    """`auto` leaves the choice to JAX: TPU, else GPU, else CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    tpu = "tpu"


class OptimizerName(StrEnum):
    """`muon` is for matrices; everything else gets AdamW beside it.

    `adafactor` keeps means of rows and columns, `lion` a momentum.
    """

    adamw = "adamw"
    muon = "muon"
    adafactor = "adafactor"
    lion = "lion"


class MomentDtype(StrEnum):
    """In which an optimizer keeps its moments; bfloat16 and int8 round at random.

    `int8` is codes of levels that grow finer towards zero (train/optimizer/moments.py).
    """

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


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


@dataclass(frozen=True)
class RunConfig:
    """A run is a directory."""

    name: str | None = None  # null: model-data-hash of what makes the run itself
    dir: str | None = None  # null: runs/<name>
    # Keys or sections, refused else, that this start may change: [data, seed].
    allow_change: list[str] = field(default_factory=list)
    # Go on from the newest checkpoint up to this step; null: from the newest.
    rewind_to: Number | None = None
    lease_interval_s: Seconds = 2.0  # the owner says this often that it is alive
    lease_timeout_s: Seconds = 20.0  # an owner that was silent this long is dead


@dataclass(frozen=True)
class RuntimeConfig:
    """The machine."""

    platform: Platform = Platform.auto  # that computes; auto: TPU, else GPU, else CPU
    # Virtual devices of a process on a CPU; null: its cores, up to two.
    cpu_devices: Annotated[int, Ge(1), Le(4096)] | None = None
    deterministic: bool = False  # GPU: reproducible to the bit, slower
    # TPU v6e: its SparseCores run the train step's collectives, beside products.
    sparse_cores: bool = True
    # A folder; null: $JAX_COMPILATION_CACHE_DIR, or ~/.cache/longhaul/xla.
    compilation_cache: str | None = None
    allow_fault_injection: bool = False  # for drills: LONGHAUL_DRILL names the fault


@dataclass(frozen=True)
class DistributedConfig:
    """The processes of a run: null is what the cluster's own variables say.

    Under Slurm, Open MPI, GKE, Cloud TPU VMs and Kubernetes JAX finds them; elsewhere
    torchrun's variables, SkyPilot's, or these keys tell (distributed/detection.py).
    """

    coordinator_address: str | None = None  # host:port of process 0; null: found
    num_processes: Count | None = None  # of the run; null: found
    process_id: Number | None = None  # of this one, from 0; null: found
    init_timeout_s: Count = 300  # for all processes to arrive
    heartbeat_timeout_s: Count = 60  # a process that is silent this long is lost
    barrier_timeout_s: Count = 300  # for all processes to say what one must know


@dataclass(frozen=True)
class WatchdogConfig:
    """How long each phase may take before the process is aborted, exit code 134."""

    enabled: bool = True  # false: a process that hangs, hangs
    init_timeout_s: Seconds = 900.0  # to find devices and processes
    compile_timeout_s: Seconds = 3600.0  # to compile the step
    restore_timeout_s: Seconds = 3600.0  # to read a checkpoint
    step_timeout_s: Seconds = 300.0  # at least, between two steps
    # Between two steps: times what log.interval_steps take at present.
    step_timeout_factor: Seconds = 20.0
    eval_timeout_s: Seconds = 1800.0  # between two batches of an evaluation
    save_timeout_s: Seconds = 1800.0  # to save a checkpoint


@dataclass(frozen=True)
class DcnConfig:
    """Factor of each mesh axis that crosses slices or hosts, the slower network."""

    pipeline: Count = 1  # slices or hosts that hold other layers
    data: Count = 1  # slices or hosts that hold copies of the model
    fsdp: Count = 1  # slices or hosts that shard the parameters
    context: Count = 1  # 1: a row stays inside a slice
    expert: Count = 1  # 1: experts stay inside a slice
    tensor: Count = 1  # slices or hosts that share each layer


# pipeline: stages of layers; data: copies of the model; fsdp: parameter shards;
# context: parts of each row; expert: groups of experts; tensor: parts of each layer.
# Slowest network first.
MESH_AXES = tuple(axis.name for axis in fields(DcnConfig))


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes (one may be -1: what is left) and the two rule tables.

    A table maps a logical axis to a mesh axis, a list of them, or null (replicated).
    """

    pipeline: AxisSize = 1  # stages, each of some layers; -1: what is left
    data: AxisSize = 1  # copies of the model; -1: what is left
    fsdp: AxisSize = 1  # parameter shards; -1: what is left
    context: AxisSize = 1  # parts of each row; -1: what is left
    expert: AxisSize = 1  # groups of experts; -1: what is left
    tensor: AxisSize = 1  # parts of each layer; -1: what is left
    # How devices that share rows attend to each other's keys; auto: ring where it can.
    context_attention: ContextAttention = ContextAttention.auto
    # How tokens reach experts on other devices; auto: on TPUs what sends less.
    expert_exchange: ExpertExchange = ExpertExchange.auto
    # Groups of layers on a stage: more make the bubble shorter, and exchange weights.
    pipeline_repeats: Count = 1
    planned: bool = False  # take sizes, remat and microbatches from a search
    dcn: DcnConfig = field(default_factory=DcnConfig)
    params: dict[str, Any] = field(default_factory=dict)  # how weights lie
    activations: dict[str, Any] = field(default_factory=dict)  # what passes layers


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, Adafactor or Lion; or Muon for the matrices with AdamW for the rest."""

    name: OptimizerName = OptimizerName.adamw  # muon: for the matrices
    # At its peak; Muon's matrices have their own, Adafactor's is relative to weights.
    learning_rate: Positive = 1e-3
    # Of matrices and embeddings only, times the learning rate.
    weight_decay: NotNegative = 0.1
    b1: Annotated[float, Ge(0), Lt(1)] = 0.9  # decay of the mean, in Lion's update
    # Decay of the mean square; Lion's of the mean.
    b2: Annotated[float, Ge(0), Lt(1)] = 0.95
    epsilon: Annotated[float, Gt(0)] = 1e-8  # added to the root of the mean square
    # In which moments are kept; computed in float32, and rounded at random.
    moment_dtype: MomentDtype = MomentDtype.float32
    # Global norm that gradients are scaled down to; null: any.
    clip_norm: Annotated[float, Gt(0)] | None = 1.0
    # Decay of an average of the weights, used by evaluation; null: none is kept.
    ema_decay: Annotated[float, Gt(0), Lt(1)] | None = None
    offload: bool = False  # moments lie in host memory between updates; not Muon's
    muon_learning_rate: Positive = 0.02  # Muon's, at its peak
    muon_momentum: Annotated[float, Ge(0), Lt(1)] = 0.95  # of Muon's mean gradient
    muon_weight_decay: NotNegative = 0.0  # of Muon's matrices, times its rate


@dataclass(frozen=True)
class ScheduleConfig:
    """The factor on every learning rate, as a function of the step."""

    name: Schedule = Schedule.cosine  # shape after the warm-up
    warmup_steps: Number = 100  # from 0 up to the peak
    decay_steps: Count | None = None  # wsd: length of the last part; null: 30 %
    final_fraction: Annotated[float, Ge(0), Le(1)] = 0.1  # of the peak, at the end

    def decay_within(self, num_steps: int) -> int:
        """Return over how many steps `wsd` falls: of null 30 %, behind the warm-up."""
        most = max(1, num_steps - self.warmup_steps)
        return self.decay_steps or min(max(1, round(0.3 * num_steps)), most)

    def falls_from(self, num_steps: int) -> int:
        """Return the step from which on `wsd` falls."""
        return max(self.warmup_steps, num_steps - self.decay_within(num_steps))


@dataclass(frozen=True)
class TrainConfig:
    """The loop and the step."""

    num_steps: Count = 1600  # updates of the whole run, the schedule's length
    accumulation_steps: Count = 1  # microbatches of one step; evaluation takes as many
    # Parts of a microbatch that are in the stages of mesh.pipeline at once; null: as
    # many as there are stages.
    pipeline_microbatches: Count | None = None
    max_skipped_steps: Number = 10  # left out in a row before exit 3
    # Leave out steps this many deviations above the recent ones; null: none.
    skip_sigma: Annotated[float, Gt(0)] | None = None
    skip_window: Annotated[int, Ge(4), Le(2**16)] = 128  # steps that count as recent
    # Steps between comparisons of the state's copies; null: never.
    replica_check_interval_steps: Count | None = 500
    # What the backward pass recomputes of a layer, or a list of what is kept of it.
    remat: Remat | tuple[Intermediate, ...] = Remat.none
    # A list of what is kept of it in host memory: [residual] is what it starts from.
    offload: tuple[OffloadName, ...] = ()
    # In which the gradients of matrices and tables travel between devices; auto: in
    # model.compute_dtype, bfloat16 if that has eight bits; float32 between the devices
    # of a CPU.
    reduce_dtype: Dtype = Dtype.auto
    # Positions of a device whose logits exist at once; null: as few as are fast.
    loss_chunk_tokens: Count | None = None
    z_loss: NotNegative = 0.0  # weight of the squared log of the softmax's sum


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    save_interval_steps: Count = 500  # steps between saves
    save_interval_minutes: Annotated[float, Gt(0)] = 10.0  # or sooner, after so long
    keep_latest: Count = 2  # older ones are deleted
    keep_every_steps: Count | None = None  # these are kept for good; null: none
    # Save after each evaluation whose loss is the lowest so far, and keep that step.
    keep_best: bool = False
    max_failed_saves: Number = 3  # in a row before the run ends


@dataclass(frozen=True)
class LayoutConfig:
    """What `python -m train.plan` shows of the layout."""

    array: str | None = None  # a parameter: show which device holds which slice


@dataclass(frozen=True)
class Config:
    """Everything `python -m train` can be told."""

    seed: RunSeed = 0  # of weights, order of the data, and sampling
    # A folder that transformers or train.export wrote, or another run's: its weights
    # are those of step 0.
    init_from: str | None = None
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
