"""Query the state of a Slurm job with Slurm's commands, and ask the job to end."""

import re
from collections.abc import Mapping, Sequence

from launch.subprocesses import run_tool
from train.errors import CRASHED, Exit

_OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
_OVER += ("OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


class QueuedJob:
    """A job that sbatch has given a number."""

    def __init__(self, handle: Mapping[str, str]):
        """Take what `submit` kept; a job that sbatch refused has no number."""
        self.number = handle.get("job")
        federation = handle.get("cluster")
        self._where = [f"--clusters={federation}"] if federation else []

    def about(self) -> dict[str, str]:
        """Return `scontrol show job` by name; nothing, once Slurm has forgotten it."""
        if self.number is None:
            return {}
        words = ["scontrol", *self._where, "show", "job", "--oneliner", self.number]
        pairs = re.findall(
            r"(?:^| )([A-Za-z/]+)=(\S*)", query_slurm(words, "Invalid job id")
        )
        return dict(reversed(pairs))  # the first of each counts: texts come later

    def state(self) -> str | None:
        """Return its state; None if it is over."""
        state = self.about().get("JobState")
        return None if state in _OVER else state

    def cancel(self, signal: str | None = None) -> None:
        """Cancel it, or send its processes a signal; nothing if it is over."""
        options = [f"--signal={signal}"] if signal else []
        assert self.number is not None
        query_slurm(["scancel", "--quiet", *self._where, *options, self.number], "")

    def describe(self) -> list[str]:
        """Return whether it runs, why it waits, and how often it was put back."""
        if self.number is None:
            return ["in no queue: sbatch did not take it"]
        about = self.about()
        if not about:
            return [f"job {self.number} is over, and forgotten"]
        state, reason = about["JobState"], about["Reason"]
        lines = [f"job {self.number}: {state.lower()}"]
        if state == "PENDING":
            lines[0] += f", waits: {reason}"
            lines.append(f"starts      {about['StartTime']}")
        else:
            lines[0] += f" ({reason})" * (reason != "None")
            lines[0] += f", {about['RunTime']} of {about['TimeLimit']}"
            lines.append(f"nodes       {about['NodeList']}, since {about['StartTime']}")
        if (restarts := about.get("Restarts", "0")) != "0":
            lines.append(f"restarts    {restarts}")
        return lines


def query_slurm(command: Sequence[str], allowed: str) -> str:
    """Run one of Slurm's commands; return its output.

    It is empty if the command fails with a message that holds `allowed`.

    Raises:
        Exit: it failed otherwise.
    """
    done = run_tool(command)
    if done.returncode and allowed not in done.stderr:
        raise Exit(CRASHED, f"{command[0]}: {done.stderr.strip()}")
    return "" if done.returncode else done.stdout
