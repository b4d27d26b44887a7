"""Render a pod of a run: one container, started without a shell.

The container has no Linux capabilities. It has the token of a service account only if
one is configured. Variables refer to Kubernetes Secrets instead of containing them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.config.cloud_clusters import KubernetesCluster
from launch.host_resources import host_memory_gib, process_cores
from launch.job import Job
from launch.job_secret import SECRET_VARIABLE

CONTAINER = "train"
_SPOT = "cloud.google.com/gke-spot"
_SECCOMP = {"seccompProfile": {"type": "RuntimeDefault"}}


@dataclass(frozen=True)
class Pods:
    """The settings of pods that differ between kinds of accelerator.

    name: the name of the replicated job.
    jobs: the number of Jobs, which are the replicas of the replicated job.
    pods_per_job: the number of pods in each Job.
    environment: variables. A value is a string, or a reference made by `from_pod`.
    resource: the name of the device resource, and the number of devices of a pod.
    selector: labels that the nodes must have.
    annotations: annotations of the JobSet.
    security_context: settings of the pod's security context.
    network: network settings of the pod's specification.
    memory_volume: whether /dev/shm is limited only by the memory of the node.
    processes: the number of processes in a pod.
    """

    name: str
    jobs: int
    pods_per_job: int
    command: Sequence[str]
    environment: Mapping[str, Any]
    resource: tuple[str, int]
    selector: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    security_context: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    memory_volume: bool = False
    processes: int = 1

    @property
    def num_processes(self) -> int:
        """The number of processes in all pods."""
        return self.jobs * self.pods_per_job * self.processes


def host_of(job: Job, replicated_job: str) -> str:
    """Return the host name of the first pod in JobSet's headless service."""
    return f"{job.name}-{replicated_job}-0-0.{job.name}"


def from_pod(kind: str, name: str) -> dict[str, Any]:
    """Return a variable's value that refers to a label or annotation of the pod."""
    return {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.{kind}['{name}']"}}}


def pod_spec(job: Job, cluster: KubernetesCluster, pods: Pods) -> dict[str, Any]:
    """Return the specification of a pod."""
    selector = {**pods.selector, **({_SPOT: "true"} if cluster.spot else {})}
    selector |= cluster.node_selector
    toleration = {"key": _SPOT, "operator": "Equal", "value": "true"}
    toleration["effect"] = "NoSchedule"
    shm_volume = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    optional = {
        "priorityClassName": cluster.priority_class,
        "serviceAccountName": cluster.service_account,
        "nodeSelector": selector,
        "volumes": [shm_volume] * pods.memory_volume,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.grace_period_s,
        # Only a pod with a configured account may call Kubernetes or the cloud.
        "automountServiceAccountToken": cluster.service_account is not None,
        "enableServiceLinks": False,
        # PID 1 cannot abort (exit code 134), so training must not be PID 1.
        "shareProcessNamespace": True,
        "securityContext": {**pods.security_context, **_SECCOMP},
        "tolerations": [
            {"key": pods.resource[0], "operator": "Exists", "effect": "NoSchedule"},
            *[toleration] * cluster.spot,
        ],
        **pods.network,
        **{key: value for key, value in optional.items() if value},
        "containers": [_container(job, cluster, pods)],
    }


def _container(job: Job, cluster: KubernetesCluster, pods: Pods) -> dict[str, Any]:
    # Only who may read the cluster's pods knows the JobSet's uid.
    uid = from_pod("labels", "jobset.sigs.k8s.io/jobset-uid")
    secret = {SECRET_VARIABLE: uid} if pods.num_processes > 1 else {}
    variables = {**pods.environment, **secret, **job.variables(cluster.code)}
    for variable, secret in cluster.secrets.items():
        name, _, key = secret.partition("/")
        reference = {"secretKeyRef": {"name": name, "key": key}}
        variables[variable] = {"valueFrom": reference}
    environment = [
        {"name": name, **({"value": escape(v)} if isinstance(v, str) else v)}
        for name, v in variables.items()
    ]
    shm_mount = {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
    return {
        "name": CONTAINER,
        "image": cluster.image,
        "command": [escape(word) for word in pods.command],
        **({"env": environment} if environment else {}),
        "resources": _resources(job, cluster, pods),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        **(shm_mount if pods.memory_volume else {}),
    }


def _resources(job: Job, cluster: KubernetesCluster, pods: Pods) -> dict[str, Any]:
    """Return a pod's resources. Memory and cores have requests, but no limits."""
    resource, count = pods.resource
    cpus = cluster.cpus
    memory = cluster.memory
    if job.staged_bytes is not None:
        cpus = cpus or process_cores(count)
        gib = host_memory_gib(job.staged_bytes, job.held_bytes, pods.processes)
        memory = memory or f"{gib}Gi"
    requests = {"cpu": cpus and str(cpus), "memory": memory}
    requests = {name: value for name, value in requests.items() if value}
    return {**({"requests": requests} if requests else {}), "limits": {resource: count}}


def escape(word: str) -> str:
    """Escape a word, so that it survives the kubelet's expansion of `$(NAME)`.

    The expansion turns every `$$` into `$`. Source: kubernetes,
    third_party/forked/golang/expansion/expand.go.
    """
    return word.replace("$", "$$")
