"""The keys of clusters in a cloud: Kubernetes, TPU VMs, SkyPilot."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Gt
from typing_extensions import Doc

from launch.config.clusters import (
    ClusterConfig,
    Code,
    CodeDelivery,
    Detach,
    GpuKind,
    Nodes,
    ProcessesPerNode,
    Setup,
    Spot,
)
from train.config import Count, Number


@dataclass(frozen=True)
class KubernetesCluster(ClusterConfig):
    """The keys that gke_tpu and gke_gpu share. Both kinds run a JobSet."""

    namespace: Annotated[str, Doc("The namespace of the JobSet.")] = "default"
    context: Annotated[
        str | None, Doc("The context of kubectl. null: the current one.")
    ] = None
    queue: Annotated[
        str | None, Doc("The local queue of Kueue. null submits without Kueue.")
    ] = None
    priority_class: Annotated[
        str | None, Doc("The priority class of the pods. null: the default one.")
    ] = None
    service_account: Annotated[
        str | None, Doc("A service account that may read and write the bucket.")
    ] = None
    image: Annotated[str | None, Doc("The container image. It is required.")] = None
    spot: Spot = False
    grace_period_s: Annotated[
        Count, Doc("How long a pod may save after SIGTERM, in seconds.")
    ] = 120
    cpus: Annotated[
        Count | None,
        Doc("The CPUs of a pod. null: from the plan (launch/host_resources.py)."),
    ] = None
    memory: Annotated[
        str | None, Doc("The memory of a pod, such as 200Gi. null: from the plan.")
    ] = None
    ttl_s: Annotated[
        Number, Doc("Finished JobSets are deleted after this time, in seconds.")
    ] = 604_800
    secrets: Annotated[
        dict[str, str],
        Doc(
            "Variables from Kubernetes Secrets, each as secret/key, such as "
            "cluster.secrets={WANDB_API_KEY: wandb/api-key}."
        ),
    ] = field(default_factory=dict)
    node_selector: Annotated[
        dict[str, str], Doc("Further labels that nodes must have.")
    ] = field(default_factory=dict)
    merge: Annotated[dict[str, Any], Doc("A table to merge into the JobSet.")] = field(
        default_factory=dict
    )
    code: Annotated[
        Code, Doc("How the code gets there: in the image, or an archive over it.")
    ] = Code.image


@dataclass(frozen=True)
class GkeTpuCluster(KubernetesCluster):
    """TPU slices of GKE."""

    target: Annotated[
        str | None,
        Doc(
            "The slices, such as v5e-256x2 for two. The names are those of train.plan."
        ),
    ] = None
    host_network: Annotated[
        bool, Doc("Use the nodes' network: faster between slices, but not isolated.")
    ] = False


@dataclass(frozen=True)
class GkeGpuCluster(KubernetesCluster):
    """GPU nodes of GKE, or of any Kubernetes with JobSet."""

    nodes: Nodes = 1
    gpus_per_node: Annotated[
        Count, Doc("The number of GPUs of a node; a pod takes all of them.")
    ] = 8
    gpu: GpuKind = None
    processes_per_node: ProcessesPerNode = 1


@dataclass(frozen=True)
class TpuVmCluster(ClusterConfig):
    """Queued resources of Cloud TPU VMs, supervised by this machine."""

    target: Annotated[
        str | None, Doc("The slices, such as v6e-8, or v5p-512x4 for four.")
    ] = None
    project: Annotated[
        str | None, Doc("The Google Cloud project. null: gcloud's default.")
    ] = None
    zone: Annotated[str | None, Doc("The zone. It is required.")] = None
    runtime_version: Annotated[
        str | None, Doc("The software of the VM. null: the usual one for the chip.")
    ] = None
    spot: Spot = False
    reserved: Annotated[bool, Doc("Use reserved machines.")] = False
    valid_until: Annotated[
        str | None,
        Doc("How long to wait for the machines, such as 6h. null sets no limit."),
    ] = None
    network: Annotated[
        str | None, Doc("The network of the VMs. null: the default one.")
    ] = None
    subnetwork: Annotated[
        str | None, Doc("The subnetwork of the VMs. null: the default one.")
    ] = None
    service_account: Annotated[
        str | None, Doc("The service account of the VMs. null: the default one.")
    ] = None
    labels: Annotated[dict[str, str], Doc("Labels of the VMs.")] = field(
        default_factory=dict
    )
    options: Annotated[
        list[str], Doc("Further options of gcloud that create the queued resource.")
    ] = field(default_factory=list)
    ssh_options: Annotated[list[str], Doc("Further options of ssh and scp.")] = field(
        default_factory=list
    )
    setup: Annotated[
        list[str] | None,
        Doc("Lines of shell to run first on each VM. null: what cluster.code needs."),
    ] = None
    python: Annotated[str, Doc("The Python on the VMs.")] = "python3"
    image: Annotated[
        str | None,
        Doc("A container image to run with docker. null runs without a container."),
    ] = None
    secrets: Annotated[
        dict[str, str],
        Doc(
            "Variables from Secret Manager, each by its name there, such as "
            "cluster.secrets={WANDB_API_KEY: wandb-key}."
        ),
    ] = field(default_factory=dict)
    code: CodeDelivery = Code.archive
    keep: Annotated[
        bool, Doc("Keep the machines after the run. Otherwise they are deleted.")
    ] = False
    poll_s: Annotated[
        float, Gt(0), Doc("The interval at which the resources are asked, in seconds.")
    ] = 30.0
    detach: Detach = False


@dataclass(frozen=True)
class SkypilotCluster(ClusterConfig):
    """A managed job of SkyPilot."""

    nodes: Nodes = 1
    accelerators: Annotated[
        str | None, Doc("The accelerators of a machine, such as H100:8.")
    ] = None
    cloud: Annotated[str | None, Doc("The cloud. null lets SkyPilot choose.")] = None
    region: Annotated[str | None, Doc("The region. null lets SkyPilot choose.")] = None
    spot: Spot = False
    image: Annotated[
        str | None, Doc("The image of the machines. null lets SkyPilot choose.")
    ] = None
    setup: Setup = field(default_factory=list)
    secrets: Annotated[
        dict[str, str],
        Doc(
            "Variables from your environment, each by its name here, such as "
            "cluster.secrets={WANDB_API_KEY: WANDB_API_KEY}."
        ),
    ] = field(default_factory=dict)
    merge: Annotated[dict[str, Any], Doc("A table to merge into the task.")] = field(
        default_factory=dict
    )
    code: CodeDelivery = Code.archive
