"""A run as a JobSet of Kubernetes (jobset.x-k8s.io/v1alpha2), from 0.10 on.

The JobSet itself states what the exit code of a process means (launch/policy.py), so
nothing else needs to watch it. There is no pause between restarts. Not seen on a
cluster yet: what is rendered is held to the schemas of JobSet and Kueue.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from launch.config import kind_of
from launch.config.cloud_clusters import KubernetesCluster
from launch.config.clusters import Code
from launch.job import Job, Rendered
from launch.kubernetes.pod import CONTAINER, Pods, pod
from launch.manifest import merge_values, to_yaml
from launch.plan_check import object_store_mistakes
from launch.policy import AGAIN, NEVER_AGAIN
from train.errors import Mistake

FILE = "jobset.yaml"
SECRETS_REMEDY = (
    "keep it in a Secret of Kubernetes, and name that: "
    "cluster.secrets={WANDB_API_KEY: wandb/api-key}"
)
_SECRET = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9._-]+")


def jobset_mistakes(cluster: KubernetesCluster, run_dir: str) -> list[Mistake]:
    """List what is wrong with the keys that both kinds have."""
    errors = []
    if not cluster.image:
        rule = "is needed: an image with this program in it (docker build), as "
        rule += "cluster.image=host/name:tag"
        errors.append(Mistake("cluster.image", None, rule))
    if cluster.code is Code.shared:
        rule = "pods do not see this machine's files: must be image or archive"
        errors.append(Mistake("cluster.code", "shared", rule))
    if not re.fullmatch(r"[1-9]\d*[KMGT]i?", cluster.memory or "1Gi"):
        rule = "must be a number with K, M, G or T, say 200Gi"
        errors.append(Mistake("cluster.memory", cluster.memory, rule))
    for variable, secret in cluster.secrets.items():
        if not _SECRET.fullmatch(secret):
            rule = "must be secret/key, a Secret's name and a key in it: "
            rule += "cluster.secrets={WANDB_API_KEY: wandb/api-key}"
            errors.append(Mistake(f"cluster.secrets.{variable}", secret, rule))
    mounts = [path.rstrip("/") + "/" for path in _mounts(cluster.merge)]
    if not any(f"{run_dir}/".startswith(mount) for mount in mounts):
        errors += object_store_mistakes(run_dir, kind_of(cluster))
    return errors


def render_jobset(job: Job, cluster: KubernetesCluster, pods: Pods) -> Rendered:
    """Return the manifest, and what is typed with it."""
    document = merge_values(_jobset(job, cluster, pods), cluster.merge)
    command = [*kubectl(cluster), "create", "-f", FILE]
    return Rendered({FILE: to_yaml(document)}, command)


def kubectl(cluster: KubernetesCluster) -> list[str]:
    """Return the words before a verb."""
    context = ["--context", cluster.context] if cluster.context else []
    return ["kubectl", *context, "--namespace", cluster.namespace]


def _jobset(job: Job, cluster: KubernetesCluster, pods: Pods) -> dict[str, Any]:
    queue = {"kueue.x-k8s.io/queue-name": cluster.queue} if cluster.queue else {}
    metadata = {
        "name": job.name,
        "namespace": cluster.namespace,
        "labels": {"app.kubernetes.io/name": "longhaul", **queue},
        "annotations": dict(pods.annotations),
    }
    template = {
        "parallelism": pods.pods,
        "completions": pods.pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one pod's end is the end of all
        "podFailurePolicy": {"rules": _pod_rules()},
        "template": {"spec": pod(job, cluster, pods)},
    }
    replicated = {"name": pods.name, "replicas": pods.jobs}
    replicated["template"] = {"spec": template}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {key: value for key, value in metadata.items() if value},
        "spec": {
            "failurePolicy": {
                "maxRestarts": cluster.max_restarts,
                "restartStrategy": "BlockingRecreate",
                "rules": _rules(),
            },
            "ttlSecondsAfterFinished": cluster.ttl_s,
            "replicatedJobs": [replicated],
        },
    }


def _pod_rules() -> list[dict[str, Any]]:
    """Return which ends of a pod end its Job with reason PodFailurePolicy.

    Others end it with BackoffLimitExceeded. Preemptions, evictions and lost nodes
    leave the condition DisruptionTarget on the pod.
    """
    of_container = {"containerName": CONTAINER, "operator": "In"}
    lost = {"type": "DisruptionTarget", "status": "True"}
    ends = [
        {"onExitCodes": {**of_container, "values": sorted(NEVER_AGAIN)}},
        {"onExitCodes": {**of_container, "values": sorted(AGAIN)}},
        {"onPodConditions": [lost]},
    ]
    return [{"action": "FailJob", **end} for end in ends]


def _rules() -> list[dict[str, Any]]:
    """Return what the end of a Job means; what no rule names restarts all, and counts.

    Source of the message's words: kubernetes, pkg/controller/job/pod_failure_policy.go,
    "... failed with exit code %v matching %v rule at index %d".
    """
    codes = "|".join(str(code) for code in sorted(NEVER_AGAIN))
    policy = {"onJobFailureReasons": ["PodFailurePolicy"]}
    patterns = [f"failed with exit code ({codes}) "]
    again = {"name": "not_counted", "action": "RestartJobSetAndIgnoreMaxRestarts"}
    return [
        {
            "name": "never_again",
            "action": "FailJobSet",
            **policy,
            "onJobFailureMessagePatterns": patterns,
        },
        {**again, **policy},
    ]


def _mounts(more: Any) -> list[str]:
    """List where volumes are mounted in what a person merges."""
    if isinstance(more, Mapping):
        paths = [more["mountPath"]] if isinstance(more.get("mountPath"), str) else []
        return paths + [path for value in more.values() for path in _mounts(value)]
    if isinstance(more, Sequence) and not isinstance(more, str):
        return [path for value in more for path in _mounts(value)]
    return []
