"""What `python -m launch` can be told: the keys of training, and its own.

Each kind of cluster has a dataclass, whose preset is `configs/cluster/<kind>.yaml`. A
key of one kind is unknown to the others.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from train.config import Config, Count, Number


class Action(StrEnum):
    """What to do; all but `submit` and `render` speak of a run that was submitted."""

    submit = "submit"
    render = "render"
    status = "status"
    logs = "logs"
    stop = "stop"
    resume = "resume"


class Code(StrEnum):
    """How this program gets there: a folder that all see, an archive, an image."""

    shared = "shared"
    archive = "archive"
    image = "image"


@dataclass(frozen=True)
class ClusterConfig:
    """What all kinds have."""

    max_restarts: Number = 10  # after crashes, not preemptions; 0: never again
    # After a crash; doubles with each, up to 10 minutes.
    backoff_s: Annotated[float, Ge(0)] = 10.0
    environment: dict[str, str] = field(default_factory=dict)  # more of it; no secrets


@dataclass(frozen=True)
class LocalCluster(ClusterConfig):
    """Processes of this machine."""

    processes: Count = 1  # that train together
    detach: bool = False  # go on in the background


@dataclass(frozen=True)
class SshCluster(ClusterConfig):
    """Machines that ssh reaches, with the run's folder on all of them."""

    hosts: list[str] = field(default_factory=list)  # [user@]host; the first leads
    processes_per_node: Count = 1  # or one for each GPU
    address: str | None = None  # of process 0, for the others; null: the first host's
    # The port of process 0's coordinator; null: from the run's name.
    port: Annotated[int, Ge(1), Le(65535)] | None = None
    options: list[str] = field(default_factory=list)  # of ssh
    setup: list[str] = field(default_factory=list)  # lines of shell, before
    python: str | None = None  # there; null: as here
    code: Code = Code.shared
    workdir: str | None = None  # there; null: as here
    poll_s: Annotated[float, Gt(0)] = 5.0
    detach: bool = False


@dataclass(frozen=True)
class SlurmCluster(ClusterConfig):
    """One sbatch job that puts itself in the queue again."""

    nodes: Count = 1  # machines
    gpus_per_node: Count | None = None  # all of a node's
    gpu: str | None = None  # their kind, to plan for: a100, h100, h200, b200
    processes_per_node: Count = 1  # or one for each GPU
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None  # [days-]hours:minutes:seconds
    cpus_per_task: Count | None = None  # null: from the plan (host_resources.py)
    memory: str | None = None  # of a node; 0: all; null: from the plan
    # Before the time limit, to save: Slurm can warn so long ahead.
    signal_s: Annotated[int, Ge(1), Le(65535)] = 120
    container_image: str | None = None  # of pyxis
    container_mounts: list[str] = field(default_factory=list)  # from:to, more of them
    options: dict[str, Any] = field(default_factory=dict)  # more of sbatch
    srun_options: dict[str, Any] = field(default_factory=dict)  # more of srun
    setup: list[str] = field(default_factory=list)  # lines of shell, before
    python: str | None = None  # there; null: as here, in a container python3
    code: Code = Code.shared
    workdir: str | None = None  # there; null: as here


@dataclass(frozen=True)
class KubernetesCluster(ClusterConfig):
    """What both kinds of GKE have: a JobSet."""

    namespace: str = "default"
    context: str | None = None  # of kubectl; null: the present one
    queue: str | None = None  # Kueue's local queue
    priority_class: str | None = None
    service_account: str | None = None  # with leave to read and write the bucket
    image: str | None = None  # required
    spot: bool = False
    grace_period_s: Count = 120  # to save, from SIGTERM on
    cpus: Count | None = None  # of a pod; null: from the plan (host_resources.py)
    memory: str | None = None  # of a pod, 200Gi; null: from the plan
    ttl_s: Number = 604_800  # a JobSet that is over is deleted after these
    # Variables from Secrets of Kubernetes, each as secret/key, say
    # cluster.secrets={WANDB_API_KEY: wandb/api-key}
    secrets: dict[str, str] = field(default_factory=dict)
    # More labels that nodes must have.
    node_selector: dict[str, str] = field(default_factory=dict)
    merge: dict[str, Any] = field(default_factory=dict)  # into the JobSet
    code: Code = Code.image  # or archive: over the image's own


@dataclass(frozen=True)
class GkeTpuCluster(KubernetesCluster):
    """TPU slices of GKE."""

    target: str | None = None  # v5e-256x2: two slices (names as in train.plan)
    host_network: bool = False  # faster between slices; the pods see their nodes'


@dataclass(frozen=True)
class GkeGpuCluster(KubernetesCluster):
    """GPU nodes of GKE, or of any Kubernetes with JobSet."""

    nodes: Count = 1  # machines
    gpus_per_node: Count = 8  # all of a node's
    gpu: str | None = None  # a100, h100, h200, b200
    processes_per_node: Count = 1  # or one for each GPU


@dataclass(frozen=True)
class TpuVmCluster(ClusterConfig):
    """Queued resources of Cloud TPU VMs, watched from here."""

    target: str | None = None  # v6e-8, v5p-512x4: four slices
    project: str | None = None  # null: gcloud's own
    zone: str | None = None  # required
    runtime_version: str | None = None  # null: the one for the chip
    spot: bool = False
    reserved: bool = False
    valid_until: str | None = None  # wait for it so long, say 6h
    network: str | None = None
    subnetwork: str | None = None
    service_account: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)  # more of create
    ssh_options: list[str] = field(default_factory=list)  # more of ssh and scp
    setup: list[str] | None = None  # lines of shell on each VM; null: what code needs
    python: str = "python3"
    image: str | None = None  # to run in docker there
    # Variables from Secret Manager, each by its name there, say
    # cluster.secrets={WANDB_API_KEY: wandb-key}
    secrets: dict[str, str] = field(default_factory=dict)
    code: Code = Code.archive
    keep: bool = False  # the machines, when the run is over; else they are deleted
    poll_s: Annotated[float, Gt(0)] = 30.0
    detach: bool = False


@dataclass(frozen=True)
class SkypilotCluster(ClusterConfig):
    """A managed job of SkyPilot's."""

    nodes: Count = 1  # machines
    accelerators: str | None = None  # H100:8
    cloud: str | None = None
    region: str | None = None
    spot: bool = False
    image: str | None = None
    setup: list[str] = field(default_factory=list)
    # Variables from your environment, each by its name here, say
    # cluster.secrets={WANDB_API_KEY: WANDB_API_KEY}
    secrets: dict[str, str] = field(default_factory=dict)
    merge: dict[str, Any] = field(default_factory=dict)  # into the task
    code: Code = Code.archive


KINDS: dict[str, type[ClusterConfig]] = {
    "local": LocalCluster,
    "ssh": SshCluster,
    "slurm": SlurmCluster,
    "gke_tpu": GkeTpuCluster,
    "gke_gpu": GkeGpuCluster,
    "tpu_vm": TpuVmCluster,
    "skypilot": SkypilotCluster,
}


@dataclass(frozen=True)
class LaunchConfig(Config):
    """Keys of `python -m launch`: those of training, and its own."""

    action: Action = Action.submit
    cluster: ClusterConfig = field(default_factory=LocalCluster)
    follow: bool = False  # logs: go on until the run ends
    force: bool = False  # submit what the plan says is of no use
    plan_first: bool = True
    output: str | None = None  # folder that `render` writes to; null: print


def kind_in(arguments: Sequence[str]) -> str:
    """Return the kind of cluster in a command line; `local` if it names none."""
    chosen = [a.partition("=")[2] for a in arguments if a.startswith("cluster=")]
    return chosen[-1] if chosen and chosen[-1] in KINDS else "local"


def kind_of(cluster: ClusterConfig) -> str:
    """Return the kind that has these keys."""
    return next(kind for kind, keys in KINDS.items() if keys is type(cluster))


def schema_of(kind: str) -> type:
    """Return the dataclass of all keys of `python -m launch`, with this kind's own."""
    cluster_field: Any = field(default_factory=KINDS[kind])
    cluster = ("cluster", KINDS[kind], cluster_field)
    return dataclasses.make_dataclass(
        "LaunchConfig", [cluster], bases=(LaunchConfig,), frozen=True
    )
