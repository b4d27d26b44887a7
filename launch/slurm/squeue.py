"""Query, signal and cancel a Slurm job with Slurm's commands."""

import re
from collections.abc import Mapping, Sequence

from launch.subprocesses import run_tool
from train.errors import CRASHED, Exit

_OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
_OVER += ("OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


class QueuedJob:
    """A job that was submitted with sbatch."""

    def __init__(self, handle: Mapping[str, str]):
        """Read the recorded handle; a job that sbatch refused has no number."""
        self.number = handle.get("job")
        federation = handle.get("cluster")
        self._clusters = [f"--clusters={federation}"] if federation else []

    def fields(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`; {} if Slurm no longer has it."""
        if self.number is None:
            return {}
        words = ["scontrol", *self._clusters, "show", "job", "--oneliner", self.number]
        pairs = re.findall(
            r"(?:^| )([A-Za-z/]+)=(\S*)", query_slurm(words, "Invalid job id")
        )
        # Free text comes last and may look like a field, so a key's first value counts.
        return dict(reversed(pairs))

    def state(self) -> str | None:
        """Return the job's state, or None if it is over."""
        state = self.fields().get("JobState")
        return None if state in _OVER else state

    def cancel(self, signal: str | None = None) -> None:
        """Cancel the job or, with `signal`, only signal its processes."""
        options = [f"--signal={signal}"] if signal else []
        assert self.number is not None
        query_slurm(["scancel", "--quiet", *self._clusters, *options, self.number], "")

    def describe(self) -> list[str]:
        """Return lines: the job's state, why the job waits, and its restarts."""
        if self.number is None:
            return ["in no queue: sbatch did not take it"]
        job = self.fields()
        if not job:
            return [f"job {self.number} is over, and forgotten"]
        state = job["JobState"]
        reason = job["Reason"]
        lines = [f"job {self.number}: {state.lower()}"]
        if state == "PENDING":
            lines[0] += f", waits: {reason}"
            lines.append(f"starts      {job['StartTime']}")
        else:
            lines[0] += f" ({reason})" * (reason != "None")
            lines[0] += f", {job['RunTime']} of {job['TimeLimit']}"
            lines.append(f"nodes       {job['NodeList']}, since {job['StartTime']}")
        if (restarts := job.get("Restarts", "0")) != "0":
            lines.append(f"restarts    {restarts}")
        return lines


def query_slurm(command: Sequence[str], allowed_error: str) -> str:
    """Run one of Slurm's commands; return its output.

    If the command fails with a message that contains `allowed_error`, returns "".

    Raises:
        Exit: the command failed with another message.
    """
    result = run_tool(command)
    if result.returncode and allowed_error not in result.stderr:
        raise Exit(CRASHED, f"{command[0]}: {result.stderr.strip()}")
    return "" if result.returncode else result.stdout
