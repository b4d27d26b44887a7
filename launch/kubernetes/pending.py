"""Explain why a JobSet's pods wait: for Kueue, the scheduler or the image."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.errors import meaning

Object = Mapping[str, Any]
_MAX_FAILURES = 8  # the maximum number of lines about failed pods


def describe_queue(queue: str, workloads: Sequence[Object]) -> str:
    """Describe the state of a JobSet in its Kueue queue."""
    if not workloads:
        return f"queue {queue}: Kueue has not taken it up (is there such a queue?)"
    newest = sorted(workloads, key=_creation_time)[-1]
    condition_list = newest.get("status", {}).get("conditions", [])
    conditions = {condition["type"]: condition for condition in condition_list}
    if conditions.get("Admitted", {}).get("status") == "True":
        return f"queue {queue}: admitted"
    why = conditions.get("QuotaReserved", {}).get("message") or "waits"
    return f"queue {queue}: {why}"


def describe_pods(
    pods: Sequence[Object], list_events: Callable[[str], Sequence[Object]]
) -> list[str]:
    """Describe the count of each phase, why the first pending pod waits, and failures.

    `list_events` returns the events of a pod by its name.
    """
    if not pods:
        return ["no pods"]
    phases = Counter(pod["status"].get("phase", "Unknown") for pod in pods)
    counts = ", ".join(f"{count} {phase.lower()}" for phase, count in phases.items())
    lines = [f"pods: {counts}"]
    waiting = [(pod, why) for pod in pods if (why := _waiting_reason(pod))]
    if waiting:
        pod, why = waiting[0]
        name = pod["metadata"]["name"]
        lines.append(f"{name} waits: {why}")
        newest_event = sorted(list_events(name), key=_last_seen)[-1:]
        lines += [f"  {e['reason']}: {e['message']}" for e in newest_event]
    failures = [line for pod in pods for line in _failure_lines(pod)]
    num_hidden = len(failures) - _MAX_FAILURES
    remainder = [f"... and {num_hidden} more"] if num_hidden > 0 else []
    return lines + failures[:_MAX_FAILURES] + remainder


def _last_seen(event: Object) -> str:
    # A repeated event keeps its creation time; only lastTimestamp is updated.
    times = (event.get(key) for key in ("lastTimestamp", "eventTime"))
    return next(filter(None, times), _creation_time(event))


def _creation_time(item: Object) -> str:
    return item.get("metadata", {}).get("creationTimestamp", "")


def _waiting_reason(pod: Object) -> str | None:
    status = pod["status"]
    if status.get("phase") != "Pending":
        return None
    for container in status.get("containerStatuses", []):
        if waiting := container.get("state", {}).get("waiting"):
            words = [waiting.get("reason"), waiting.get("message")]
            return ": ".join(filter(None, words))
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    return "for its node"


def _failure_lines(pod: Object) -> list[str]:
    name = pod["metadata"]["name"]
    lines = []
    for container in pod["status"].get("containerStatuses", []):
        terminated = container.get("state", {}).get("terminated")
        if terminated and terminated["exitCode"]:
            code = terminated["exitCode"]
            reason = terminated.get("reason", "Error")
            why = meaning(code) if reason == "Error" else reason
            lines.append(f"{name} ended with {code}: {why}")
    return lines
