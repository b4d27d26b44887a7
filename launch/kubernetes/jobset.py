"""Render a run as a JobSet (jobset.x-k8s.io/v1alpha2), for JobSet 0.10 or later.

The JobSet's failure policy implements launch/policy.py, so no supervisor is needed.
There is no pause between restarts. This is not tested on a cluster yet; tests check
the manifest against the schemas of JobSet and Kueue.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from data.errors import Mistake
from launch.config import kind_of
from launch.config.cloud_clusters import KubernetesCluster
from launch.config.clusters import Code
from launch.job import Job, Rendered
from launch.kubernetes.pod import CONTAINER, Pods, pod_spec
from launch.manifest import merge_values, to_yaml
from launch.plan_check import object_store_mistakes
from launch.policy import NO_RESTART_CODES, RESTART_CODES

FILE = "jobset.yaml"
SECRETS_REMEDY = (
    "keep it in a Secret of Kubernetes, and name that: "
    "cluster.secrets={WANDB_API_KEY: wandb/api-key}"
)
_SECRET = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9._-]+")


def jobset_mistakes(cluster: KubernetesCluster, run_dir: str) -> list[Mistake]:
    """List the mistakes in the keys that `gke_tpu` and `gke_gpu` share."""
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
    mounts = [path.rstrip("/") + "/" for path in mount_paths(cluster.merge)]
    if not any(f"{run_dir}/".startswith(mount) for mount in mounts):
        errors += object_store_mistakes(run_dir, kind_of(cluster))
    return errors


def render_jobset(job: Job, cluster: KubernetesCluster, pods: Pods) -> Rendered:
    """Return the manifest, and the command that creates the JobSet."""
    document = merge_values(_jobset(job, cluster, pods), cluster.merge)
    command = [*kubectl_prefix(cluster), "create", "-f", FILE]
    return Rendered({FILE: to_yaml(document)}, command)


def kubectl_prefix(cluster: KubernetesCluster) -> list[str]:
    """Return the words of a kubectl command that precede the verb."""
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
        "parallelism": pods.pods_per_job,
        "completions": pods.pods_per_job,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # the failure of one pod fails the Job
        "podFailurePolicy": {"rules": _pod_rules()},
        "template": {"spec": pod_spec(job, cluster, pods)},
    }
    replicated_job = {"name": pods.name, "replicas": pods.jobs}
    replicated_job["template"] = {"spec": template}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {key: value for key, value in metadata.items() if value},
        "spec": {
            "failurePolicy": {
                "maxRestarts": cluster.max_restarts,
                "restartStrategy": "BlockingRecreate",
                "rules": _job_rules(),
            },
            "ttlSecondsAfterFinished": cluster.ttl_s,
            "replicatedJobs": [replicated_job],
        },
    }


def _pod_rules() -> list[dict[str, Any]]:
    """Return the rules that fail a Job with the reason PodFailurePolicy.

    A pod that matches no rule fails its Job with the reason BackoffLimitExceeded.
    Kubernetes sets the condition DisruptionTarget on a pod that it preempts, evicts or
    loses with its node.
    """
    in_container = {"containerName": CONTAINER, "operator": "In"}
    disruption = {"type": "DisruptionTarget", "status": "True"}
    conditions = [
        {"onExitCodes": {**in_container, "values": sorted(NO_RESTART_CODES)}},
        {"onExitCodes": {**in_container, "values": sorted(RESTART_CODES)}},
        {"onPodConditions": [disruption]},
    ]
    return [{"action": "FailJob", **condition} for condition in conditions]


def _job_rules() -> list[dict[str, Any]]:
    """Return the rules for failed Jobs. A failure without a rule counts as a crash.

    Source of the message pattern: kubernetes, pkg/controller/job/pod_failure_policy.go,
    "... failed with exit code %v matching %v rule at index %d".
    """
    codes = "|".join(str(code) for code in sorted(NO_RESTART_CODES))
    reasons = {"onJobFailureReasons": ["PodFailurePolicy"]}
    patterns = [f"failed with exit code ({codes}) "]
    restart = {"name": "not_counted", "action": "RestartJobSetAndIgnoreMaxRestarts"}
    return [
        {
            "name": "never_again",
            "action": "FailJobSet",
            **reasons,
            "onJobFailureMessagePatterns": patterns,
        },
        {**restart, **reasons},
    ]


def mount_paths(node: Any) -> list[str]:
    """List each `mountPath` in `cluster.merge` or, recursively, in a part of it."""
    if isinstance(node, Mapping):
        paths = [node["mountPath"]] if isinstance(node.get("mountPath"), str) else []
        return paths + [path for child in node.values() for path in mount_paths(child)]
    if isinstance(node, Sequence) and not isinstance(node, str):
        return [path for child in node for path in mount_paths(child)]
    return []
