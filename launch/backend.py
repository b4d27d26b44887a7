"""The interface of each kind of cluster: a module with these names."""

from typing import Any, Protocol

from launch.job import Job, Rendered
from launch.plan_check import Machine
from launch.submissions import Submission
from train.errors import Mistake


class Backend(Protocol):
    """A kind of cluster."""

    @property
    def SECRETS_REMEDY(self) -> str:
        """Return what to do instead of writing a secret into `cluster.environment`."""
        ...

    def mistakes(self, cluster: Any, run_dir: str) -> list[Mistake]:
        """List what is wrong with the cluster's keys, or with where the run lies."""
        ...

    def machine(self, cluster: Any) -> Machine:
        """Return what the plan is made for."""
        ...

    def render(self, job: Job, cluster: Any) -> Rendered:
        """Return what would be submitted, without asking the cluster or writing."""
        ...

    def submit(
        self, job: Job, cluster: Any, rendered: Rendered, submission: Submission
    ) -> int:
        """Submit what was rendered, keep the job's handle, and return an exit code."""
        ...

    def alive(self, submission: Submission) -> bool:
        """Return whether the job runs, or waits to."""
        ...

    def status(self, submission: Submission) -> list[str]:
        """Return what the cluster knows of the job, in lines; why it waits, if so."""
        ...

    def logs(self, submission: Submission, follow: bool) -> int:
        """Print what the run has said, and, to follow it, go on until it ends."""
        ...

    def stop(self, submission: Submission) -> int:
        """Let the run save and stop for good, and wait until it has."""
        ...
