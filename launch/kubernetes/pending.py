"""Why a JobSet's pods wait, in sentences: from Kueue, the scheduler, the image."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.errors import meaning

Object = Mapping[str, Any]
_MOST = 8  # lines of pods that have failed


def describe_queue(queue: str, workloads: Sequence[Object]) -> str:
    """Describe what Kueue says of a JobSet in its queue."""
    if not workloads:
        return f"queue {queue}: Kueue has not taken it up (is there such a queue?)"
    all_of_them = workloads[-1].get("status", {}).get("conditions", [])
    conditions = {condition["type"]: condition for condition in all_of_them}
    if conditions.get("Admitted", {}).get("status") == "True":
        return f"queue {queue}: admitted"
    why = conditions.get("QuotaReserved", {}).get("message", "waits")
    return f"queue {queue}: {why}"


def describe_pods(
    pods: Sequence[Object], events: Callable[[str], Sequence[Object]]
) -> list[str]:
    """Count a JobSet's pods; describe why the first that waits does, and who failed.

    `events` returns those of a pod, the newest last.
    """
    if not pods:
        return ["no pods"]
    phases = Counter(pod["status"].get("phase", "Unknown") for pod in pods)
    counts = ", ".join(f"{count} {phase.lower()}" for phase, count in phases.items())
    lines = [f"pods: {counts}"]
    waiting = [(pod, why) for pod in pods if (why := _why_it_waits(pod))]
    if waiting:
        pod, why = waiting[0]
        name = pod["metadata"]["name"]
        lines.append(f"{name} waits: {why}")
        newest = events(name)[-1:]
        lines += [f"  {event['reason']}: {event['message']}" for event in newest]
    ended = [line for pod in pods for line in _how_it_ended(pod)]
    more = [f"... and {len(ended) - _MOST} more"] if len(ended) > _MOST else []
    return lines + ended[:_MOST] + more


def _why_it_waits(pod: Object) -> str | None:
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


def _how_it_ended(pod: Object) -> list[str]:
    name, lines = pod["metadata"]["name"], []
    for container in pod["status"].get("containerStatuses", []):
        ended = container.get("state", {}).get("terminated")
        if ended and ended["exitCode"]:
            code, reason = ended["exitCode"], ended.get("reason", "Error")
            why = meaning(code) if reason == "Error" else reason
            lines.append(f"{name} ended with {code}: {why}")
    return lines
