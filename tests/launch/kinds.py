"""A job, clusters with their keys, and an attempt, for tests of all cluster kinds."""

import io
import tarfile
import threading
from dataclasses import replace
from typing import Any

import yaml

from data.errors import Mistake
from data.program import FOLDER
from launch.config import (
    GkeGpuCluster,
    GkeTpuCluster,
    LocalCluster,
    SkypilotCluster,
    SlurmCluster,
    SshCluster,
    TpuVmCluster,
    kind_of,
)
from launch.config.clusters import Code
from launch.job import Job, Rendered
from launch.kubernetes.jobset import FILE
from launch.submit import BACKENDS

UNPACKER = FOLDER / "launch" / "unpack.py"

RUN_DIR = "gs://bucket/runs/base-1b"
JOB = Job(
    *("base-1b-12345678", RUN_DIR, f"{RUN_DIR}/launch/1"),
    *(("model=gpt_nano", f'run.dir="{RUN_DIR}"'), "/root", "/here"),
    environment={"A": "b $c", "NCCL_DEBUG": "INFO"},
)
SHARED = replace(
    JOB,
    run_dir="/runs/base-1b",
    folder="/runs/base-1b/launch/1",
    overrides=("model=gpt_nano", 'run.dir="/runs/base-1b"'),
)
SSH = SshCluster(hosts=["n0", "me@n1"], python="trainer")
TPU = GkeTpuCluster(target="v5p-64x2", image="registry/image:tag")
GPU = GkeGpuCluster(nodes=2, gpu="h100", image="registry/image:tag")
ALL_KEYS: dict[str, Any] = {
    "namespace": "team",
    "context": "prod",
    "queue": "tpus",
    "priority_class": "high",
    "service_account": "trainer",
    "spot": True,
    "grace_period_s": 25,
    "max_restarts": 3,
    "secrets": {"WANDB_API_KEY": "wandb/api-key"},
    "cpus": 90,
    "memory": "300Gi",
    "ttl_s": 60,
    "node_selector": {"cloud.google.com/gke-nodepool": "mine"},
    "code": Code.archive,
}
SLURM = SlurmCluster(
    nodes=4,
    gpus_per_node=8,
    gpu="h100",
    time="1-00:00:00",
    partition="batch",
    cpus_per_task=96,
    container_image="nvcr.io#nvidia/jax:26.01",
    options={"exclusive": True, "reservation": None},
    srun_options={"mpi": "none"},
    setup=["module load slurm"],
)
TPU_VM = TpuVmCluster(
    target="v6e-256x2",
    project="my-project",
    zone="us-east5-b",
    spot=True,
    valid_until="6h",
    network="net",
    subnetwork="sub",
    service_account="me@my-project.iam.gserviceaccount.com",
    labels={"team": "a"},
    options=["--tags=train"],
    ssh_options=["--tunnel-through-iap"],
    secrets={"WANDB_API_KEY": "wandb"},
)
SKY = SkypilotCluster(
    nodes=4,
    accelerators="A100-80GB:8",
    cloud="gcp",
    region="us-central1",
    spot=True,
    image="docker:host/name:tag",
    setup=["pip install 'jax[cuda13]'", "nvidia-smi"],
    secrets={"WANDB_API_KEY": "MY_KEY"},
    max_restarts=3,
    backoff_s=5,
    code=Code.image,
)
GOLDEN: dict[str, Any] = {
    "local/2": LocalCluster(processes=2),
    "ssh/archive": replace(SSH, code=Code.archive, processes_per_node=8),
    "slurm/gpu": SLURM,
    "gke_tpu/slice": replace(TPU, target="v5e-256", **ALL_KEYS),
    "gke_gpu/processes": replace(GPU, processes_per_node=8, **ALL_KEYS),
    "tpu_vm/full": TPU_VM,
    "skypilot/full": SKY,
}
OTHERS = [
    LocalCluster(),
    replace(SSH, setup=["module load x"]),
    SlurmCluster(nodes=2, python="python"),
    TPU,
    replace(TPU, target="v6e-8", host_network=True),
    GPU,
    TpuVmCluster(target="v5e-16", zone="us-west4-a"),
    replace(TPU_VM, code=Code.image, image="a/b:c", target="v5p-8"),
    SkypilotCluster(accelerators="H100:8"),
]


def render(cluster: Any, job: Job | None = None) -> Rendered:
    shared = isinstance(cluster, LocalCluster | SshCluster | SlurmCluster)
    job = job or (SHARED if shared else JOB)
    return BACKENDS[kind_of(cluster)].render(job, cluster)


def mistakes(cluster: Any, run_dir: str = RUN_DIR) -> list[Mistake]:
    return BACKENDS[kind_of(cluster)].cluster_mistakes(cluster, run_dir)


def manifest(cluster: Any, job: Job = JOB) -> dict[str, Any]:
    return yaml.safe_load(render(cluster, job).files[FILE])


def contents(packed: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        files = {m.name: tar.extractfile(m) for m in tar}
        return {name: file.read() for name, file in files.items() if file is not None}


class Played:
    """An attempt that ends with given codes, or with other codes if it is stopped."""

    def __init__(self, codes, stopped=None):
        self.codes = codes
        self._stopped = stopped
        self.told: list[int] = []
        self._end = threading.Event()

    def wait(self):
        if self._stopped is not None:
            assert self._end.wait(30)
        return self.codes

    def stop(self, number):
        self.told.append(number)
        self.codes = self._stopped or self.codes
        self._end.set()
