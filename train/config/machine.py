"""Devices, processes, and how long each phase of a start may take."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Le
from typing_extensions import Doc

from data.config import Count, Number
from train.config.bounds import Seconds


class Platform(StrEnum):
    """`auto` leaves the choice to JAX: TPU, otherwise GPU, otherwise CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    tpu = "tpu"


@dataclass(frozen=True)
class RuntimeConfig:
    """The devices, and how XLA uses them."""

    platform: Annotated[
        Platform,
        Doc("The platform that computes. auto: TPU, otherwise GPU, otherwise CPU."),
    ] = Platform.auto
    cpu_devices: Annotated[
        Annotated[int, Ge(1), Le(4096)] | None,
        Doc(
            "The number of virtual devices of one process on a CPU. null: as many as "
            "it has cores, but at most two."
        ),
    ] = None
    deterministic: Annotated[
        bool, Doc("Make GPU programs bitwise reproducible, at a cost in speed.")
    ] = False
    sparse_cores: Annotated[
        bool,
        Doc(
            "On TPU v6e, run the collectives of the training step on the SparseCores, "
            "overlapped with matrix products."
        ),
    ] = True
    gpu_tuning: Annotated[
        bool,
        Doc(
            "On NVIDIA GPUs, reserve 90 % of the memory, overlap more collectives with "
            "products, and run the norms of layers by kernels that read less. false "
            "keeps the defaults of JAX and XLA."
        ),
    ] = True
    compilation_cache: Annotated[
        str | None,
        Doc(
            "The folder of compiled programs. null means $JAX_COMPILATION_CACHE_DIR, "
            "or ~/.cache/longhaul/xla if that is not set."
        ),
    ] = None
    prove_kernels: Annotated[
        bool,
        Doc(
            "Compare the kernels with plain formulas before the first step. The run "
            "ends with exit code 5 if they differ."
        ),
    ] = False
    allow_fault_injection: Annotated[
        bool, Doc("Let the variable LONGHAUL_DRILL break this run on purpose.")
    ] = False


@dataclass(frozen=True)
class DistributedConfig:
    """The processes of a run. A key that is null is detected.

    JAX detects the processes under Slurm, Open MPI, GKE, Cloud TPU VMs and Kubernetes.
    Elsewhere the environment variables of torchrun or SkyPilot are used
    (train/distributed/detection.py). With neither, several processes need these keys.
    """

    coordinator_address: Annotated[
        str | None, Doc("The host:port of process 0. null detects it.")
    ] = None
    num_processes: Annotated[
        Count | None, Doc("The number of processes in the run. null detects it.")
    ] = None
    process_id: Annotated[
        Number | None,
        Doc("The index of this process, counted from 0. null detects it."),
    ] = None
    init_timeout_s: Annotated[
        Count, Doc("How long to wait, in seconds, for every process to join.")
    ] = 300
    heartbeat_timeout_s: Annotated[
        Count, Doc("A process that is silent for this many seconds is lost.")
    ] = 60
    barrier_timeout_s: Annotated[
        Count,
        Doc("How long to wait, in seconds, for every process to answer at a barrier."),
    ] = 300


@dataclass(frozen=True)
class WatchdogConfig:
    """How long each phase may take before the process is aborted with exit code 134."""

    enabled: Annotated[
        bool, Doc("Watch this process. Without it, a hanging process hangs forever.")
    ] = True
    init_timeout_s: Annotated[
        Seconds, Doc("The limit for finding devices and the other processes.")
    ] = 900.0
    compile_timeout_s: Annotated[Seconds, Doc("The limit for compiling the step.")] = (
        3600.0
    )
    restore_timeout_s: Annotated[
        Seconds, Doc("The limit for reading a checkpoint.")
    ] = 3600.0
    step_timeout_s: Annotated[
        Seconds,
        Doc(
            "The limit between two steps. watchdog.step_timeout_factor can only raise "
            "it."
        ),
    ] = 300.0
    step_timeout_factor: Annotated[
        Seconds,
        Doc(
            "The limit between two steps is at least this many times the time that "
            "log.interval_steps take at present."
        ),
    ] = 20.0
    eval_timeout_s: Annotated[
        Seconds, Doc("The limit between two batches of an evaluation.")
    ] = 1800.0
    save_timeout_s: Annotated[Seconds, Doc("The limit for saving a checkpoint.")] = (
        1800.0
    )
