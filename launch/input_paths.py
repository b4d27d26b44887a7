"""Check that the machines of a cluster can read the inputs that a config names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.errors import Mistake
from launch.config import kind_of
from launch.config.clusters import Code
from launch.kubernetes.jobset import mount_paths


def input_path_mistakes(config: Any) -> list[Mistake]:
    """List the inputs of a run that only this machine can read.

    Pods see an object store and what `cluster.merge` mounts. TPU VMs see an object
    store and, with `cluster.code=shared`, what this machine sees.
    """
    cluster = config.cluster
    folders = list[str]()
    kind = kind_of(cluster)
    if kind in ("gke_tpu", "gke_gpu"):
        hosts = "pods"
        other = "mount a volume that holds it: cluster.merge"
        folders = [path.rstrip("/") + "/" for path in mount_paths(cluster.merge)]
    elif kind == "tpu_vm" and cluster.code is not Code.shared:
        hosts = "TPU VMs"
        other = "use a file system that they share with it: cluster.code=shared"
    else:
        return []
    rule = f"is a path of this machine, whose files {hosts} do not see: name a copy in "
    rule += f"an object store (gs://bucket/... or s3://), or {other}"
    return [
        Mistake(key, path, rule)
        for key, path in _input_paths(config)
        if "://" not in path and not any(f"{path}/".startswith(f) for f in folders)
    ]


def _input_paths(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the key and the path of each file or folder that training reads."""
    data = config.data
    if data.path:
        yield "data.path", data.path
    for name, source in data.sources.items():
        yield f"data.sources.{name}.path", source.path
    for name, path in config.eval.paths.items():
        yield f"eval.sets.{name}.path", path
    if "/" in data.tokenizer or Path(data.tokenizer).exists():
        yield "data.tokenizer", data.tokenizer
    optional = {"eval.task_path": config.eval.task_path, "init_from": config.init_from}
    yield from ((key, path) for key, path in optional.items() if path)
