"""`cluster=gke_gpu`: GPU nodes of GKE, or of any Kubernetes with JobSet.

The JobSet has one Job with a pod for each node. The pods find each other by torchrun's
variables and the host name of the first pod. This is not tested on a cluster yet.
"""

from data.errors import Mistake
from launch import gpu_variables as gpu
from launch.config import GkeGpuCluster
from launch.job import Job, Rendered, port_of, start_words
from launch.kubernetes import jobset
from launch.kubernetes.jobset import SECRETS_REMEDY as SECRETS_REMEDY
from launch.kubernetes.kubectl import alive, logs, status, stop, submit  # noqa: F401
from launch.kubernetes.pod import Pods, from_pod, host_of
from launch.node import node_command
from launch.plan_check import Machine

NODE = "node"


def cluster_mistakes(cluster: GkeGpuCluster, run_dir: str) -> list[Mistake]:
    """List the mistakes in the cluster's keys, and in the run's directory."""
    return [*gpu.gpu_mistakes(cluster), *jobset.jobset_mistakes(cluster, run_dir)]


def machine(cluster: GkeGpuCluster) -> Machine:
    """Return the nodes as the machine to plan for."""
    return gpu.machine_of(cluster.gpu, cluster.gpus_per_node, cluster)


def render(job: Job, cluster: GkeGpuCluster) -> Rendered:
    """Return the JobSet's manifest, and the command that creates it."""
    many_processes = cluster.processes_per_node > 1
    prefix = ()
    if many_processes:
        words = start_words("launch.node", "python", cluster.code)
        prefix = node_command(words, cluster.processes_per_node)
    index = from_pod("annotations", "batch.kubernetes.io/job-completion-index")
    pods = Pods(
        name=NODE,
        jobs=1,
        pods_per_job=cluster.nodes,
        command=job.command("python", cluster.code, prefix),
        environment={
            **gpu.job_variables(job.environment),
            **job.cache_variables(),
            "MASTER_ADDR": host_of(job, NODE),
            "MASTER_PORT": str(port_of(job.name)),
            "WORLD_SIZE": str(cluster.nodes * cluster.processes_per_node),
            "NODE_RANK" if many_processes else "RANK": index,
        },
        resource=("nvidia.com/gpu", cluster.gpus_per_node),
        security_context={"runAsNonRoot": True},
        processes=cluster.processes_per_node,
        memory_volume=True,  # NCCL connects the processes of a node through /dev/shm
    )
    return jobset.render_jobset(job, cluster, pods)
