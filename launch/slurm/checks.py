"""Check the values of `cluster.*` for Slurm.

sbatch splits a directive at spaces, removes its quotes and ends it at a `#`. Values
with these characters, or with others that no option needs, are refused.
"""

import re
from collections.abc import Iterator
from typing import Any

from data.errors import Mistake
from data.storage import is_remote
from launch import gpu_variables as gpu
from launch.config import SlurmCluster
from launch.config.clusters import Code

_VALUE = r"[A-Za-z0-9_.,:;/@%+=\[\]()*&|!~^-]+"
_VALUE_RULE = "may hold only letters, digits, _ . , : ; / @ % + = [ ] ( ) * & | ! ~ ^ -"
_MEMORY_RULE = "must be a number, with K, M, G or T, say 500G"
_TIME_RULE = "must be [days-]hours:minutes:seconds, say 1-12:00:00"
_TIME = r"UNLIMITED|\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}"
_KEY_OF = {  # from an option to the key of `cluster` that sets the option
    "ntasks": "processes_per_node",
    "ntasks-per-node": "processes_per_node",
    "gpus-per-node": "gpus_per_node",
    "cpus-per-task": "cpus_per_task",
    "mem": "memory",
    "chdir": "workdir",
    "signal": "signal_s",
    "container-image": "container_image",
    "container-mounts": "container_mounts",
    "container-workdir": "workdir",
}
_KEY_OF |= {name: name for name in ("nodes", "time", "partition", "account", "qos")}
_FIXED = ("job-name", "output", "error", "open-mode", "requeue", "no-requeue", "array")
_FIXED += ("wrap", "parsable", "wait", "kill-on-bad-exit", "test-only", "container-env")
# A process that sees only one GPU cannot reach other GPUs of its node over NVLink.
_GPU_HIDING_OPTIONS = ("gpus-per-task", "ntasks-per-gpu", "gpu-bind")


def cluster_mistakes(cluster: SlurmCluster, run_dir: str) -> list[Mistake]:
    """List the mistakes in the cluster's keys, and in the run's directory."""
    errors = [*_text_mistakes(cluster), *gpu.gpu_mistakes(cluster)]
    errors += _container_mistakes(cluster, run_dir)
    for key in ("cluster.options", "cluster.srun_options"):
        options = cluster.options if key == "cluster.options" else cluster.srun_options
        for name, value in options.items():
            if rule := _broken_rule(str(name), value):
                errors.append(Mistake(f"{key}.{name}", value, rule))
    return errors


def _text_mistakes(cluster: SlurmCluster) -> Iterator[Mistake]:
    """Yield the mistakes in the texts that become #SBATCH directives."""
    for name, value, pattern, rule in (
        ("partition", cluster.partition, _VALUE, _VALUE_RULE),
        ("account", cluster.account, _VALUE, _VALUE_RULE),
        ("qos", cluster.qos, _VALUE, _VALUE_RULE),
        ("memory", cluster.memory, r"\d+[KMGT]?", _MEMORY_RULE),
        ("time", cluster.time, _TIME, _TIME_RULE),
    ):
        if value is not None and not re.fullmatch(pattern, value):
            yield Mistake(f"cluster.{name}", value, rule)


def _broken_rule(name: str, value: Any) -> str | None:
    """Return the rule that an option breaks, or None."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        return "must be the long name of an option, without the leading --"
    if name in _GPU_HIDING_OPTIONS:
        rule = "hides the GPUs of a node from each other. For one GPU each, set "
        return rule + "cluster.processes_per_node to cluster.gpus_per_node"
    if name in _KEY_OF:
        return f"is set by cluster.{_KEY_OF[name]}"
    if name in _FIXED:
        return "is reserved for the launcher"
    if not isinstance(value, bool | int | float | str | None):
        return "must be text, a number, true, false or null"
    is_malformed = isinstance(value, str) and not re.fullmatch(_VALUE, value)
    return _VALUE_RULE if is_malformed else None


def _container_mistakes(cluster: SlurmCluster, run_dir: str) -> Iterator[Mistake]:
    image = cluster.container_image
    if cluster.code is Code.image and image is None:
        rule = "needs cluster.container_image"
        yield Mistake("cluster.code", str(cluster.code), rule)
    if image is None and cluster.container_mounts:
        rule = "needs cluster.container_image"
        yield Mistake("cluster.container_mounts", cluster.container_mounts, rule)
    if image is not None and not is_remote(run_dir) and re.search("[,:]", run_dir):
        rule = "must hold neither , nor : because it is mounted into a container"
        yield Mistake("run.dir", run_dir, rule)
