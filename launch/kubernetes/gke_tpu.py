"""`cluster=gke_tpu`: TPU slices of GKE, run by a JobSet with one Job for each slice.

GKE sets the variables that connect the processes of a slice, and this module sets the
variables that connect slices; JAX's cluster detection reads both. The container runs as
root but without capabilities: since GKE 1.28, root needs no privileges to use the
chips. This is not tested on a TPU yet.
"""

from typing import Any

from data.errors import Mistake
from launch.config import GkeTpuCluster
from launch.job import Job, Rendered
from launch.kubernetes import jobset
from launch.kubernetes.jobset import SECRETS_REMEDY as SECRETS_REMEDY
from launch.kubernetes.kubectl import alive, logs, status, stop, submit  # noqa: F401
from launch.kubernetes.pod import Pods, from_pod, host_of
from launch.plan_check import Machine, tpu_target
from train.hardware.targets import Target, parse_target

SLICE = "slice"
# Values of the label gke-tpu-accelerator. Sources: GKE, "Plan TPUs"; xpk,
# src/xpk/core/system_characteristics.py at 367c838.
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
_IN_ONE_POOL = {_EXCLUSIVE: "cloud.google.com/gke-nodepool"}
_HOST_NETWORK = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}


def cluster_mistakes(cluster: GkeTpuCluster, run_dir: str) -> list[Mistake]:
    """List the mistakes in the cluster's keys, and in the run's directory."""
    return _target_mistakes(cluster.target) + jobset.jobset_mistakes(cluster, run_dir)


def _target_mistakes(name: str | None) -> list[Mistake]:
    target = tpu_target(name)
    if isinstance(target, Mistake):
        return [target]
    if target.num_hosts == target.slices > 1:
        # Source: GKE, "Deploy TPU Multislices in GKE": only multi-host pools can join.
        rule = "has several slices of one host each, which GKE does not join"
        return [Mistake("cluster.target", name, rule)]
    return []


def machine(cluster: GkeTpuCluster) -> Machine:
    """Return the slices as the machine to plan for."""
    return Machine(target=cluster.target)


def render(job: Job, cluster: GkeTpuCluster) -> Rendered:
    """Return the JobSet's manifest, and the command that creates it."""
    assert cluster.target is not None  # checked by `cluster_mistakes`
    target = parse_target(cluster.target)
    hosts_per_slice = target.num_hosts // target.slices
    pods = Pods(
        name=SLICE,
        jobs=target.slices,
        pods_per_job=hosts_per_slice,
        command=job.command("python", cluster.code),
        environment={**job.cache_variables(), **_environment(job, target)},
        resource=("google.com/tpu", target.chips_per_host),
        selector={
            "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[target.family],
            "cloud.google.com/gke-tpu-topology": "x".join(map(str, target.topology)),
        },
        # A slice is one node pool, so all pods of a slice must be placed in one pool.
        annotations=_IN_ONE_POOL if hosts_per_slice > 1 else {},
        # The container runs as root, because device files belong to root unless
        # containerd is configured otherwise. Source: kubernetes/kubernetes#92211.
        security_context={"runAsUser": 0},
        network=_HOST_NETWORK if cluster.host_network else {},
    )
    return jobset.render_jobset(job, cluster, pods)


def _environment(job: Job, target: Target) -> dict[str, Any]:
    """Return the variables that connect processes and that GKE does not set.

    A single host also needs variables: because its Job is Indexed, it otherwise looks
    like one of several hosts (train/distributed/detection.py). GKE adds missing
    MEGASCALE_* variables to the pods of a JobSet, and xpk and axlearn rely on this.
    Here they are set explicitly.
    """
    if target.num_hosts == 1:
        return {"MASTER_ADDR": "localhost", "WORLD_SIZE": "1", "RANK": "0"}
    if target.slices == 1:
        return {}
    return {
        "MEGASCALE_NUM_SLICES": str(target.slices),
        "MEGASCALE_SLICE_ID": from_pod("labels", "jobset.sigs.k8s.io/job-index"),
        "MEGASCALE_COORDINATOR_ADDRESS": host_of(job, SLICE),
    }
