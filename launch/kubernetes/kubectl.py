"""The actions of `python -m launch` on a rendered JobSet, through kubectl.

A finished JobSet stays in the cluster, with its pods and their output, until the run is
submitted again or `cluster.ttl_s` has passed.
"""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from launch.config import ClusterConfig
from launch.config.cloud_clusters import KubernetesCluster
from launch.host_resources import warn_of_short_notice
from launch.job import Job, Rendered
from launch.kubernetes.jobset import FILE, kubectl_prefix
from launch.kubernetes.pending import describe_pods, describe_queue
from launch.kubernetes.pod import CONTAINER
from launch.submissions import Submission
from launch.subprocesses import ask_tool, run_tool
from train.errors import FINISHED

log = logging.getLogger(__name__)

_POLL_S = 2.0
_MARGIN_S = 120  # seconds for deleting other objects after the last pod has ended
_SPOT_NOTICE_S = 15  # seconds from notice to kill of a pod. Source: GKE, "Spot VMs"
_OVER = ("Completed", "Failed")
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name="
_RANK_0 = ",jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"


def submit(
    job: Job, cluster: KubernetesCluster, rendered: Rendered, submission: Submission
) -> int:
    """Create the JobSet, after deleting a finished JobSet of the same name."""
    if cluster.backoff_s != ClusterConfig().backoff_s:
        log.warning("cluster.backoff_s has no effect: JobSet restarts at once")
    if cluster.spot:
        warn_of_short_notice(job, _SPOT_NOTICE_S, "cluster.spot: GKE leaves pods")
    submission = submission.with_handle(
        kubectl=kubectl_prefix(cluster), grace_period_s=cluster.grace_period_s
    )
    if (jobset := _jobset(submission)) and _is_over(jobset):
        stop(submission)
    _ask(submission, ["create", "-f", "-"], input=rendered.files[FILE])
    print(f"{job.name}: submitted; action=status shows its state")
    return FINISHED


def alive(submission: Submission) -> bool:
    """Return whether the job is running, or waiting to run."""
    jobset = _jobset(submission)
    return jobset is not None and not _is_over(jobset)


def status(submission: Submission) -> list[str]:
    """Describe the JobSet's state, and why its pods wait."""
    jobset = _jobset(submission)
    if jobset is None:
        return ["not found: it was stopped or deleted"]
    state = jobset.get("status", {})
    over = _is_over(jobset)
    lines = [_describe_jobset(jobset, over)]
    if restarts := state.get("restarts", 0):
        counted = state.get("restartsCountTowardsMax", 0)
        lines.append(f"restarted {restarts} times, {counted} of them counted")
    queue = jobset["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
    if queue and not over:
        owner = f"kueue.x-k8s.io/job-uid={jobset['metadata']['uid']}"
        workloads = _list(submission, "workloads.kueue.x-k8s.io", "--selector", owner)
        lines.append(describe_queue(queue, workloads))
    pods = _list(submission, "pods", "--selector", _JOBSET_LABEL + submission.name)

    def list_events(pod_name: str) -> list[dict[str, Any]]:
        selector = f"involvedObject.kind=Pod,involvedObject.name={pod_name}"
        return _list(submission, "events", "--field-selector", selector)

    return lines + describe_pods(pods, list_events)


def logs(submission: Submission, follow: bool) -> int:
    """Print the output of process 0 (with `follow`, until the JobSet is over)."""
    printed_pod = ""
    since = ""
    while True:
        over = not (follow and alive(submission))
        pod = _process_0_pod(submission)
        if pod:
            words = ["logs", pod, "--container", CONTAINER]
            words += ["--follow"] * (not over)
            words += [f"--since-time={since}"] if pod == printed_pod else []
            result = _run(submission, words, capture_output=False)
            if result.returncode == 0:
                printed_pod = pod
                since = datetime.now(UTC).isoformat(timespec="seconds")
        if over:
            if not pod:
                print("there is no pod yet, or no longer", file=sys.stderr)
            return FINISHED
        time.sleep(_POLL_S)


def stop(submission: Submission) -> int:
    """Delete the JobSet, and wait until its pods have saved and ended."""
    timeout_s = submission.handle["grace_period_s"] + _MARGIN_S
    words = ["delete", "jobset", submission.name, "--ignore-not-found"]
    words += ["--cascade=foreground", "--wait", f"--timeout={timeout_s}s"]
    _ask(submission, words)
    return FINISHED


def _jobset(submission: Submission) -> dict[str, Any] | None:
    words = ["get", "jobset", submission.name, "--ignore-not-found", "-ojson"]
    output = _ask(submission, words)
    return json.loads(output) if output.strip() else None


def _list(submission: Submission, kind: str, *arguments: str) -> list[dict[str, Any]]:
    """Return objects; none if kubectl fails, for example without the right to list."""
    result = _run(submission, ["get", kind, *arguments, "-ojson"])
    return json.loads(result.stdout)["items"] if result.returncode == 0 else []


def _process_0_pod(submission: Submission) -> str:
    """Return the name of process 0's newest pod that has started, or ""."""
    selector = _JOBSET_LABEL + submission.name + _RANK_0
    pods = _list(submission, "pods", "--selector", selector)
    started = [pod for pod in pods if pod["status"].get("phase") != "Pending"]
    started.sort(key=lambda pod: pod["metadata"]["creationTimestamp"])
    return started[-1]["metadata"]["name"] if started else ""


def _is_over(jobset: dict[str, Any]) -> bool:
    return jobset.get("status", {}).get("terminalState") in _OVER


def _describe_jobset(jobset: dict[str, Any], over: bool) -> str:
    state = jobset.get("status", {})
    true_conditions = [c for c in state.get("conditions", []) if c["status"] == "True"]
    if over:
        final_state = state["terminalState"]
        why = [
            c.get("message", "") for c in true_conditions if c["type"] == final_state
        ]
        return ": ".join([final_state.lower(), *filter(None, why)])
    if jobset["spec"].get("suspend"):
        return "suspended: it waits for Kueue, or until it is resumed"
    is_restarting = "Restarting" in {c["type"] for c in true_conditions}
    return "restarting" if is_restarting else "submitted"


def _ask(submission: Submission, words: Sequence[str], **options: Any) -> str:
    """Run kubectl; return its output, or raise Exit if it fails."""
    return ask_tool([*submission.handle["kubectl"], *words], **options)


def _run(
    submission: Submission, words: Sequence[str], **options: Any
) -> subprocess.CompletedProcess[str]:
    return run_tool([*submission.handle["kubectl"], *words], **options)
