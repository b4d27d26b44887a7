"""The keys of `python -m launch`: training keys, launcher keys and cluster keys.

Each kind of cluster has its own dataclass of keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from typing_extensions import Doc

from launch.config.cloud_clusters import (
    GkeGpuCluster,
    GkeTpuCluster,
    SkypilotCluster,
    TpuVmCluster,
)
from launch.config.clusters import ClusterConfig, LocalCluster, SlurmCluster, SshCluster
from train.config import Config
from train.own_parts import with_sections


class Action(StrEnum):
    """The action. All but `submit` and `render` need a run that was submitted."""

    submit = "submit"
    render = "render"
    status = "status"
    logs = "logs"
    stop = "stop"
    resume = "resume"


KINDS: dict[str, type[ClusterConfig]] = {
    "local": LocalCluster,
    "ssh": SshCluster,
    "slurm": SlurmCluster,
    "gke_tpu": GkeTpuCluster,
    "gke_gpu": GkeGpuCluster,
    "tpu_vm": TpuVmCluster,
    "skypilot": SkypilotCluster,
}


@dataclass(frozen=True)
class LaunchConfig(Config):
    """Keys of `python -m launch`, in addition to those of training."""

    action: Annotated[Action, Doc("What to do with the run.")] = Action.submit
    cluster: ClusterConfig = field(default_factory=LocalCluster)
    follow: Annotated[bool, Doc("action=logs continues until the run ends.")] = False
    force: Annotated[
        bool, Doc("Submit the run even if the plan says that it is of no use.")
    ] = False
    plan_first: Annotated[bool, Doc("Make a plan before the run is submitted.")] = True
    output: Annotated[
        str | None, Doc("The folder that action=render writes to. null prints.")
    ] = None
    json: Annotated[
        bool, Doc("Print one JSON object, for programs. Other text goes to stderr.")
    ] = False


def kind_in(arguments: Sequence[str]) -> str:
    """Return a command line's kind of cluster; `local` if it names no known kind."""
    chosen = [a.partition("=")[2] for a in arguments if a.startswith("cluster=")]
    return chosen[-1] if chosen and chosen[-1] in KINDS else "local"


def kind_of(cluster: ClusterConfig) -> str:
    """Return the name of a cluster's kind."""
    return next(kind for kind, schema in KINDS.items() if schema is type(cluster))


def schema_of(kind: str) -> type:
    """Return the dataclass of all keys of `python -m launch` for a kind of cluster."""
    return with_sections(LaunchConfig, {"cluster": KINDS[kind]})
