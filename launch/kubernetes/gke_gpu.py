"""`cluster=gke_gpu`: GPU nodes of GKE, or of any Kubernetes with JobSet.

One Job with a pod for each node. The pods find each other by torchrun's variables and
the name that JobSet gives the first of them: no package, and no leave to ask
Kubernetes. A pod is one process with all GPUs of its node, or, through launch/node.py,
as many processes as are asked for. Not seen on a cluster yet.
"""

from launch import gpu_variables as gpu
from launch.config import GkeGpuCluster
from launch.job import Job, Rendered, port_of
from launch.kubernetes import jobset
from launch.kubernetes.jobset import SECRETS_REMEDY as SECRETS_REMEDY
from launch.kubernetes.kubectl import alive as alive
from launch.kubernetes.kubectl import logs as logs
from launch.kubernetes.kubectl import status as status
from launch.kubernetes.kubectl import stop as stop
from launch.kubernetes.kubectl import submit as submit
from launch.kubernetes.pod import Pods, annotation, host_of
from launch.node import node_command
from launch.plan_check import Machine
from train.errors import ConfigError, Mistake
from train.hardware.targets import parse_target

NODE = "node"
_INDEX = "batch.kubernetes.io/job-completion-index"


def mistakes(cluster: GkeGpuCluster, run_dir: str) -> list[Mistake]:
    """List what is wrong with the cluster's keys, or with where the run lies."""
    found = []
    if cluster.processes_per_node not in (1, cluster.gpus_per_node):
        value, gpus = cluster.processes_per_node, cluster.gpus_per_node
        rule = f"must be 1, or one for each of cluster.gpus_per_node={gpus}"
        found.append(Mistake("cluster.processes_per_node", value, rule))
    if cluster.gpu is not None:
        found += _gpu_mistakes(cluster.gpu)
    return [*found, *jobset.mistakes(cluster, run_dir)]


def _gpu_mistakes(gpu: str) -> list[Mistake]:
    try:
        known = parse_target(f"{gpu}-8").platform == "cuda"
    except ConfigError:
        known = False
    rule = "must be a100, h100, h200 or b200; null: any, and the plan knows no memory"
    return [] if known else [Mistake("cluster.gpu", gpu, rule)]


def machine(cluster: GkeGpuCluster) -> Machine:
    """Plan for the nodes."""
    how = cluster.gpus_per_node, cluster.nodes, cluster.environment
    return gpu.machine_of(cluster.gpu, *how)


def render(job: Job, cluster: GkeGpuCluster) -> Rendered:
    """Return the JobSet."""
    several = cluster.processes_per_node > 1
    around = node_command("python", cluster.processes_per_node) if several else ()
    index = annotation(_INDEX)
    pods = Pods(
        name=NODE,
        jobs=1,
        pods=cluster.nodes,
        command=job.command("python", cluster.code, around),
        environment={
            **gpu.values(job.environment),
            **job.cache_variables(),
            "MASTER_ADDR": host_of(job, NODE),
            "MASTER_PORT": str(port_of(job.name)),
            "WORLD_SIZE": str(cluster.nodes * cluster.processes_per_node),
            "NODE_RANK" if several else "RANK": index,
        },
        resource=("nvidia.com/gpu", cluster.gpus_per_node),
        user={"runAsNonRoot": True},
        processes=cluster.processes_per_node,
        memory_volume=True,  # NCCL's, between processes of a node
    )
    return jobset.render(job, cluster, pods)
