"""The variables of NCCL for jobs on NVIDIA GPUs, and the GPUs that a plan is for.

slurm, gke_gpu and skypilot set these variables. A variable in `cluster.environment`
takes precedence over the same variable here. Variables that depend on the site are left
out, and so are values that are defaults of NCCL. The program itself sets what JAX and
XLA need (`runtime.gpu_tuning`).

Source: docs.nvidia.com/deeplearning/nccl, "Environment Variables".
"""

from collections.abc import Mapping

from data.errors import Mistake
from launch.config import GkeGpuCluster, SkypilotCluster, SlurmCluster
from launch.plan_check import Machine
from train.errors import ConfigError
from train.hardware.targets import GPUS, GPUS_PER_RACK, RACKS, parse_target

SETTINGS = {"NCCL_DEBUG": "WARN"}  # NCCL logs why a connection failed.


def job_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a GPU job; values in `environment` take precedence."""
    return {**SETTINGS, **environment}


def gpu_target(family: str, gpus_per_node: int, nodes: int) -> str:
    """Return the name of some nodes of GPUs.

    The nodes of a rack are joined by NVLink, so the name counts racks, which have as
    many GPUs each as possible.
    """
    domain = gpus_per_node
    if family in RACKS:
        total = gpus_per_node * nodes
        domain = max((n for n in GPUS_PER_RACK if total % n == 0), default=domain)
    return f"{family}-{domain}x{gpus_per_node * nodes // domain}"


def machine_of(
    kind: str | None,
    gpus_per_node: int,
    cluster: SlurmCluster | GkeGpuCluster | SkypilotCluster,
) -> Machine:
    """Return GPU nodes as a named target, or as a count if the name is unknown."""
    try:
        name = gpu_target(str(kind), gpus_per_node, cluster.nodes)
        target = parse_target(name).name
    except ConfigError:
        return Machine(devices=gpus_per_node * cluster.nodes)
    return Machine(target, variables=job_variables(cluster.environment))


def gpu_mistakes(cluster: SlurmCluster | GkeGpuCluster) -> list[Mistake]:
    """List the mistakes in the keys that describe the GPUs of a node."""
    errors = []
    gpus = cluster.gpus_per_node
    if gpus is not None and cluster.processes_per_node not in (1, gpus):
        rule = f"must be 1, a process with all GPUs, or cluster.gpus_per_node={gpus}, "
        rule += "one GPU each: with any other number some would be idle"
        value = cluster.processes_per_node
        errors.append(Mistake("cluster.processes_per_node", value, rule))
    if cluster.gpu is None:
        return errors
    if gpus is None:
        rule = "needs cluster.gpus_per_node=<number>"
        errors.append(Mistake("cluster.gpu", cluster.gpu, rule))
    try:
        is_cuda = parse_target(f"{cluster.gpu}-8").platform == "cuda"
    except ConfigError:
        is_cuda = False
    if not is_cuda:
        rule = f"must be one of {GPUS}, or null (no memory limit in the plan)"
        errors.append(Mistake("cluster.gpu", cluster.gpu, rule))
    return errors
