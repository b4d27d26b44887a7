"""The keys of clusters that are reached by a shell: this machine, ssh and Slurm.

The preset of each kind is `configs/cluster/<kind>.yaml`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

from train.config import Count, Number


class Code(StrEnum):
    """How the code gets to the machines: a shared folder, an archive, or an image."""

    shared = "shared"
    archive = "archive"
    image = "image"


# The types of keys that several kinds of clusters have.
Nodes = Annotated[Count, Doc("The number of machines.")]
ProcessesPerNode = Annotated[
    Count, Doc("The number of processes on each machine: 1, or one for each GPU.")
]
GpuKind = Annotated[
    str | None, Doc("The kind of GPU to plan for, such as h100 or gb300.")
]
Setup = Annotated[list[str], Doc("Lines of shell to run first.")]
Workdir = Annotated[
    str | None, Doc("The working folder there. null: the same path as here.")
]
CodeDelivery = Annotated[Code, Doc("How the code gets there.")]
Spot = Annotated[bool, Doc("Use spot machines.")]
Detach = Annotated[bool, Doc("Return at once; the run continues in the background.")]


@dataclass(frozen=True)
class ClusterConfig:
    """The keys of every kind of cluster."""

    max_restarts: Annotated[
        Number,
        Doc(
            "How often crashes, not preemptions, are followed by a new start. 0: never."
        ),
    ] = 10
    backoff_s: Annotated[
        float,
        Ge(0),
        Doc(
            "The wait after a crash, in seconds. It doubles with each, up to 10 "
            "minutes."
        ),
    ] = 10.0
    environment: Annotated[
        dict[str, str],
        Doc("Further environment variables. It is no place for secrets."),
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class LocalCluster(ClusterConfig):
    """Processes of this machine."""

    processes: Annotated[Count, Doc("The number of processes that train together.")] = 1
    detach: Detach = False


@dataclass(frozen=True)
class SshCluster(ClusterConfig):
    """Machines that ssh reaches and that share the run's folder."""

    hosts: Annotated[
        list[str], Doc("The machines as [user@]host. The first runs process 0.")
    ] = field(default_factory=list)
    processes_per_node: ProcessesPerNode = 1
    address: Annotated[
        str | None,
        Doc("The address of process 0 for the others. null: the first host's name."),
    ] = None
    port: Annotated[
        Annotated[int, Ge(1), Le(65535)] | None,
        Doc(
            "The port of process 0's coordinator. null derives it from the run's name."
        ),
    ] = None
    options: Annotated[list[str], Doc("Further options of ssh.")] = field(
        default_factory=list
    )
    setup: Setup = field(default_factory=list)
    python: Annotated[
        str | None, Doc("The Python there. null: the same path as here.")
    ] = None
    code: CodeDelivery = Code.shared
    workdir: Workdir = None
    poll_s: Annotated[
        float, Gt(0), Doc("The interval at which the machines are asked, in seconds.")
    ] = 5.0
    detach: Detach = False


@dataclass(frozen=True)
class SlurmCluster(ClusterConfig):
    """One sbatch job that requeues itself."""

    nodes: Nodes = 1
    gpus_per_node: Annotated[
        Count | None, Doc("The number of GPUs of a node; a job takes all of them.")
    ] = None
    gpu: GpuKind = None
    processes_per_node: ProcessesPerNode = 1
    partition: Annotated[
        str | None, Doc("Slurm's partition. null: the default one.")
    ] = None
    account: Annotated[str | None, Doc("Slurm's account. null: the default one.")] = (
        None
    )
    qos: Annotated[
        str | None, Doc("Slurm's quality of service. null: the default one.")
    ] = None
    time: Annotated[
        str | None,
        Doc("The time limit, [days-]hours:minutes:seconds. null: the default one."),
    ] = None
    cpus_per_task: Annotated[
        Count | None,
        Doc("The CPUs of a process. null: from the plan (launch/host_resources.py)."),
    ] = None
    memory: Annotated[
        str | None, Doc("The memory of a node. 0: all of it. null: from the plan.")
    ] = None
    signal_s: Annotated[
        int,
        Ge(1),
        Le(65535),
        Doc("How long before the time limit the run saves, in seconds."),
    ] = 120
    container_image: Annotated[
        str | None, Doc("An image for pyxis. null runs without a container.")
    ] = None
    container_mounts: Annotated[list[str], Doc("Further mounts, as from:to.")] = field(
        default_factory=list
    )
    options: Annotated[dict[str, Any], Doc("Further options of sbatch.")] = field(
        default_factory=dict
    )
    srun_options: Annotated[dict[str, Any], Doc("Further options of srun.")] = field(
        default_factory=dict
    )
    setup: Setup = field(default_factory=list)
    python: Annotated[
        str | None,
        Doc(
            "The Python there. null: the same path as here, or python3 in a container."
        ),
    ] = None
    code: CodeDelivery = Code.shared
    workdir: Workdir = None
