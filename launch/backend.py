"""The interface that a module implements for each kind of cluster."""

from typing import Any, Protocol

from data.errors import Mistake
from launch.job import Job, Rendered
from launch.plan_check import Machine
from launch.submissions import Submission


class Backend(Protocol):
    """The functions and the constant that each kind of cluster provides."""

    @property
    def SECRETS_REMEDY(self) -> str:
        """Advice on where to keep a secret instead of `cluster.environment`."""
        ...

    def cluster_mistakes(self, cluster: Any, run_dir: str) -> list[Mistake]:
        """List the mistakes in the cluster's keys, and in the run's directory."""
        ...

    def machine(self, cluster: Any) -> Machine:
        """Return the machine to plan for; an empty `Machine` skips the plan."""
        ...

    def render(self, job: Job, cluster: Any) -> Rendered:
        """Return the files and commands, without writing or querying anything."""
        ...

    def submit(
        self, job: Job, cluster: Any, rendered: Rendered, submission: Submission
    ) -> int:
        """Submit the rendered job, and record its handle; return an exit code.

        A backend that supervises the run itself returns after the end of the run.
        """
        ...

    def alive(self, submission: Submission) -> bool:
        """Return whether the job is running, or waiting to run."""
        ...

    def status(self, submission: Submission) -> list[str]:
        """Return lines that describe the job's state, and why the job waits."""
        ...

    def logs(self, submission: Submission, follow: bool) -> int:
        """Print the output (with `follow`, until the run ends); return an exit code."""
        ...

    def stop(self, submission: Submission) -> int:
        """Make the run save and end for good; wait for its end; return an exit code."""
        ...
