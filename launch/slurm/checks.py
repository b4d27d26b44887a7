"""What may stand in `cluster.*` for Slurm.

sbatch splits a directive at spaces, takes its quotes away and ends it at a `#`, so the
values hold nothing of that kind, nor anything else that none of its options needs.
"""

import re
from collections.abc import Iterator

from launch.config import Code, SlurmCluster
from train.errors import ConfigError, Mistake
from train.hardware.targets import parse_target

_VALUE = r"[A-Za-z0-9_.,:;/@%+=\[\]()*&|!~^-]+"
_VALUE_RULE = "must be of letters, digits and _ . , : ; / @ % + = [ ] ( ) * & | ! ~ ^ -"
_TIME = r"UNLIMITED|\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}"
_KEYS = {  # option: the key that it has here
    "nodes": "nodes",
    "ntasks": "processes_per_node",
    "ntasks-per-node": "processes_per_node",
    "gpus-per-node": "gpus_per_node",
    "cpus-per-task": "cpus_per_task",
    "mem": "memory",
    "time": "time",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "chdir": "workdir",
    "signal": "signal_s",
    "container-image": "container_image",
    "container-mounts": "container_mounts",
    "container-workdir": "workdir",
}
_OURS = ("job-name", "output", "error", "open-mode", "requeue", "no-requeue", "array")
_OURS += ("wrap", "parsable", "wait", "kill-on-bad-exit", "test-only", "container-env")
# A process that sees one GPU only cannot reach the others of its node over NVLink.
_ONE_EACH = ("gpus-per-task", "ntasks-per-gpu", "gpu-bind")


def slurm_mistakes(cluster: SlurmCluster, run_dir: str) -> list[Mistake]:
    """List what is wrong with the cluster's keys."""
    found = [*_texts(cluster), *_options(cluster)]
    return [*found, *_gpus(cluster), *_code(cluster, run_dir)]


def _texts(cluster: SlurmCluster) -> Iterator[Mistake]:
    """List mistakes in what ends up in a directive."""
    rules = {
        "partition": (_VALUE, _VALUE_RULE),
        "account": (_VALUE, _VALUE_RULE),
        "qos": (_VALUE, _VALUE_RULE),
        "memory": (r"\d+[KMGT]?", "must be a number, with K, M, G or T, say 500G"),
        "time": (_TIME, "must be [days-]hours:minutes:seconds, say 1-12:00:00"),
    }
    for name, (form, rule) in rules.items():
        value = getattr(cluster, name)
        if value is not None and not re.fullmatch(form, value):
            yield Mistake(f"cluster.{name}", value, rule)


def _options(cluster: SlurmCluster) -> Iterator[Mistake]:
    for where, options in (
        ("cluster.options", cluster.options),
        ("cluster.srun_options", cluster.srun_options),
    ):
        for name, value in options.items():
            key = f"{where}.{name}"
            if not re.fullmatch(r"[a-z][a-z0-9-]*", str(name)):
                rule = "must be the long name of an option, without the leading --"
                yield Mistake(key, value, rule)
            elif name in _ONE_EACH:
                rule = "breaks what GPUs of a node share; cluster.processes_per_node="
                rule += (
                    "cluster.gpus_per_node gives each process one in a way that works"
                )
                yield Mistake(key, value, rule)
            elif name in _KEYS:
                yield Mistake(key, value, f"is said by cluster.{_KEYS[name]}")
            elif name in _OURS:
                yield Mistake(key, value, "is for the launcher to say")
            elif not isinstance(value, bool | int | float | str | None):
                yield Mistake(key, value, "must be text, a number, true, false or null")
            elif isinstance(value, str) and not re.fullmatch(_VALUE, value):
                yield Mistake(key, value, _VALUE_RULE)


def _gpus(cluster: SlurmCluster) -> Iterator[Mistake]:
    gpus, processes = cluster.gpus_per_node, cluster.processes_per_node
    if gpus is not None and processes not in (1, gpus):
        rule = f"must be 1, a process with all GPUs, or cluster.gpus_per_node={gpus}, "
        rule += "one GPU each: with any other number some would be idle"
        yield Mistake("cluster.processes_per_node", processes, rule)
    if cluster.gpu is None:
        return
    if gpus is None:
        rule = "needs cluster.gpus_per_node=<number>"
        yield Mistake("cluster.gpu", cluster.gpu, rule)
    try:
        known = parse_target(f"{cluster.gpu}-8").platform == "cuda"
    except ConfigError:
        known = False
    if not known:
        rule = "must be a100, h100, h200, b200, or null: then no plan is made for it"
        yield Mistake("cluster.gpu", cluster.gpu, rule)


def _code(cluster: SlurmCluster, run_dir: str) -> Iterator[Mistake]:
    image = cluster.container_image
    if cluster.code is Code.image and image is None:
        rule = "needs cluster.container_image"
        yield Mistake("cluster.code", str(cluster.code), rule)
    if image is None and cluster.container_mounts:
        rule = "needs cluster.container_image"
        yield Mistake("cluster.container_mounts", cluster.container_mounts, rule)
    if image is not None and "://" not in run_dir and re.search("[,:]", run_dir):
        rule = "must hold no , and no : to be mounted into a container"
        yield Mistake("run.dir", run_dir, rule)
