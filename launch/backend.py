"""What `python -m launch` asks of each kind of cluster: a module with these names."""

from typing import Any, Protocol

from launch.job import Job, Rendered
from launch.plan_check import Machine
from launch.submissions import Record
from train.errors import Mistake


class Backend(Protocol):
    """A kind of cluster."""

    @property
    def WHERE_SECRETS_GO(self) -> str:
        """Say what to do instead of writing a secret into `cluster.environment`."""
        ...

    def mistakes(self, cluster: Any, run_dir: str) -> list[Mistake]:
        """List what is wrong with the cluster's keys, or with where the run lies."""
        ...

    def machine(self, cluster: Any) -> Machine:
        """Say what the plan is to be made for."""
        ...

    def render(self, job: Job, cluster: Any) -> Rendered:
        """Give what would be submitted; asks nobody, writes nothing."""
        ...

    def submit(self, job: Job, cluster: Any, rendered: Rendered, record: Record) -> int:
        """Submit what was rendered and lies in the record's folder by now.

        Keeps how the cluster knows the job (`record.with_handle`); gives an exit code.
        """
        ...

    def alive(self, record: Record) -> bool:
        """Say whether the job runs, or waits to."""
        ...

    def status(self, record: Record) -> list[str]:
        """Say what the cluster knows of the job, a line each; why it waits, if so."""
        ...

    def logs(self, record: Record, follow: bool) -> int:
        """Print what the run has said, and, to follow it, go on until it ends."""
        ...

    def stop(self, record: Record) -> int:
        """Let the run save and stop for good, and wait until it has."""
        ...
