"""What holds for every kind of cluster: presets, golden files, mistakes, plans."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import yaml

from launch import gpu_variables as gpu
from launch.config import (
    KINDS,
    Code,
    GkeGpuCluster,
    GkeTpuCluster,
    LocalCluster,
    SkypilotCluster,
    SlurmCluster,
    SshCluster,
    TpuVmCluster,
    kind_of,
)
from launch.job import Job, Rendered, job_name
from launch.plan_check import Machine
from launch.submit import BACKENDS
from tests.fleet import REPOSITORY
from tests.launch.controllers import refused
from tests.launch.golden import equals_golden
from tests.launch.hostile import VALUES
from tests.launch.launched import says
from train.cli.command import config_yaml
from train.errors import Mistake

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
CLUSTERS: dict[str, Any] = {
    "local/1": LocalCluster(),
    "local/2": LocalCluster(processes=2),
    "ssh/shared": replace(SSH, setup=["module load x"]),
    "ssh/archive": replace(SSH, code=Code.archive, processes_per_node=8),
    "slurm/cpu": SlurmCluster(nodes=2, python="python"),
    "slurm/gpu": SLURM,
    "gke_tpu/slices": TPU,
    "gke_tpu/slice": replace(TPU, target="v5e-256", **ALL_KEYS),
    "gke_tpu/host": replace(TPU, target="v6e-8", host_network=True),
    "gke_gpu/nodes": GPU,
    "gke_gpu/processes": replace(GPU, processes_per_node=8, **ALL_KEYS),
    "tpu_vm/full": TPU_VM,
    "tpu_vm/one": TpuVmCluster(target="v5e-16", zone="us-west4-a"),
    "tpu_vm/image": replace(TPU_VM, code=Code.image, image="a/b:c", target="v5p-8"),
    "skypilot/archive": SkypilotCluster(accelerators="H100:8"),
    "skypilot/full": SKY,
}


def render(cluster: Any, job: Job | None = None) -> Rendered:
    shared = isinstance(cluster, LocalCluster | SshCluster | SlurmCluster)
    job = job or (SHARED if shared else JOB)
    return BACKENDS[kind_of(cluster)].render(job, cluster)


def mistakes(cluster: Any, run_dir: str = RUN_DIR) -> list[Mistake]:
    return BACKENDS[kind_of(cluster)].mistakes(cluster, run_dir)


@pytest.mark.parametrize("name", CLUSTERS)
def test_rendered(name, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    cluster = CLUSTERS[name]
    assert mistakes(cluster) == []
    rendered = render(cluster)
    equals_golden(name, rendered)
    if name.startswith("gke"):
        assert refused(yaml.safe_load(rendered.files["jobset.yaml"])) == []


@pytest.mark.parametrize("kind", KINDS)
def test_presets_tell_all_keys_with_their_defaults(kind):
    preset = yaml.safe_load((REPOSITORY / f"configs/cluster/{kind}.yaml").read_text())
    defaults = yaml.safe_load(config_yaml(KINDS[kind]()))
    without_effect = {"backoff_s"} if kind.startswith("gke") else set()
    assert preset == {k: v for k, v in defaults.items() if k not in without_effect}


@pytest.mark.parametrize(
    ("cluster", "changes", "key", "rule"),
    [
        (SSH, {"hosts": []}, "hosts", "must name at least one"),
        (SSH, {"hosts": ["-oProxyCommand=x"]}, "hosts", "a host as ssh takes it"),
        (SSH, {"hosts": ["a b"]}, "hosts", "must be a host as ssh takes it"),
        (SSH, {"hosts": ["a", "a"]}, "hosts", "must differ"),
        (SSH, {"address": "$(x)"}, "hosts", "must be a host as ssh takes it"),
        (SSH, {"code": Code.image}, "code", "must be shared or archive"),
        (SLURM, {"time": "a day"}, "time", "[days-]hours"),
        (SLURM, {"memory": "500 GB"}, "memory", "say 500G"),
        (SLURM, {"options": {"gpus-per-task": 1}}, "options.gpus-per-task", "breaks"),
        (SLURM, {"srun_options": {"gpu-bind": ""}}, "srun_options.gpu-bind", "breaks"),
        (SLURM, {"options": {"nodes": 3}}, "options.nodes", "said by cluster.nodes"),
        (SLURM, {"options": {"output": "x"}}, "options.output", "launcher to say"),
        (SLURM, {"options": {"--x": True}}, "options.--x", "without the leading --"),
        (SLURM, {"options": {"licenses": ["a"]}}, "options.licenses", "must be text"),
        (SLURM, {"gpus_per_node": None}, "gpu", "needs cluster.gpus_per_node"),
        (SLURM, {"gpu": "v5e"}, "gpu", "must be a100"),
        (SLURM, {"processes_per_node": 2}, "processes_per_node", "must be 1"),
        (SlurmCluster(), {"code": Code.image}, "code", "cluster.container_image"),
        (SlurmCluster(), {"container_mounts": ["/a:/a"]}, "container_mounts", "needs"),
        (TPU, {"target": None}, "target", "is needed"),
        (TPU, {"target": "v5e-7"}, "target", "v5e comes in"),
        (TPU, {"target": "h100-8"}, "target", "is no TPU"),
        (TPU, {"target": "v5e-8x2"}, "target", "which GKE does not join"),
        (TPU, {"image": None}, "image", "is needed"),
        (TPU, {"code": Code.shared}, "code", "pods do not see"),
        (TPU, {"memory": "300 Gi"}, "memory", "say 200Gi"),
        (TPU, {"secrets": {"A": "b"}}, "secrets.A", "wandb/api-key"),
        (TPU, {"secrets": {"A": "B/c"}}, "secrets.A", "wandb/api-key"),
        (GPU, {"processes_per_node": 3}, "processes_per_node", "must be 1"),
        (GPU, {"gpu": "v5e"}, "gpu", "must be a100"),
        (GPU, {"gpu": "h1000"}, "gpu", "must be a100"),
        (TPU_VM, {"target": "tpu7x-128"}, "target", "GKE only: cluster=gke_tpu"),
        (TPU_VM, {"target": "h100-8x4"}, "target", "must be a TPU"),
        (TPU_VM, {"target": "v5e-3"}, "target", "v5e comes in"),
        (TPU_VM, {"target": None}, "target", "is required, say v6e-8"),
        (TPU_VM, {"zone": None}, "zone", "is required, say us-east5-b"),
        (TPU_VM, {"reserved": True}, "spot, cluster.reserved", "go not together"),
        (TPU_VM, {"image": "a"}, "image", "goes with cluster.code=image"),
        (TPU_VM, {"secrets": {"a b": "c"}}, "secrets", "must be a variable's name"),
        (SKY, {"cloud": None}, "region", "is a region of what?"),
        (SKY, {"code": Code.shared}, "code", "must be archive or image"),
        (SKY, {"image": None}, "image", "is needed with cluster.code=image"),
        (SKY, {"secrets": {"A": "a=secret"}}, "secrets", "{WANDB_API_KEY: WANDB_"),
        (SKY, {"secrets": {"a=secret": "A"}}, "secrets", "{WANDB_API_KEY: WANDB_"),
    ],
)
def test_what_cannot_be_is_refused(cluster, changes, key, rule):
    assert mistakes(cluster) == []
    (mistake,) = mistakes(replace(cluster, **changes))
    assert mistake.key == f"cluster.{key}"
    assert rule in mistake.rule
    assert "a=secret" not in str(mistake.value)


@pytest.mark.parametrize("cluster", [TPU, GPU, TPU_VM, SKY], ids=kind_of)
def test_a_run_lies_where_its_machines_see_it(cluster):
    (mistake,) = mistakes(cluster, "/runs/a")
    assert mistake.key == "run.dir"
    assert f"cluster={kind_of(cluster)} " in mistake.rule
    assert "give run.dir=gs://bucket/runs/name" in mistake.rule


@pytest.mark.parametrize(
    ("cluster", "machine"),
    [
        (LocalCluster(), Machine()),
        (SSH, Machine()),
        (SLURM, Machine("h100-8x4", variables=gpu.values({}))),
        (replace(SLURM, gpu=None), Machine(devices=32)),
        (replace(SLURM, gpus_per_node=6, nodes=2), Machine(devices=12)),
        (SlurmCluster(nodes=4), Machine()),
        (TPU, Machine("v5p-64x2")),
        (GPU, Machine("h100-8x2", variables=gpu.values({}))),
        (replace(GPU, gpu=None), Machine(devices=16)),
        (TPU_VM, Machine("v6e-256x2")),
        (SKY, Machine("a100-8x4", variables=gpu.values({}))),
        (SkypilotCluster(accelerators="L4:3", nodes=2), Machine(devices=6)),
        (SkypilotCluster(), Machine()),
    ],
)
def test_the_plan_is_made_for_the_machine(cluster, machine):
    assert BACKENDS[kind_of(cluster)].machine(cluster) == machine


@pytest.mark.parametrize("value", VALUES)
def test_hostile_names_of_runs(value):
    job = replace(JOB, name=job_name(value, f"gs://bucket/{value}"))
    for cluster in (TPU, GPU):
        document = yaml.safe_load(render(cluster, job).files["jobset.yaml"])
        assert refused(document) == []
    assert yaml.safe_load(render(SKY, job).files["task.yaml"])["name"] == job.name


@pytest.mark.parametrize(
    ("arguments", "start", "end", "held"),
    [
        (
            [
                *("cluster=gke_tpu", "cluster.target=v5e-256x2", "cluster.image=i"),
                "cluster.node_selector={cloud.google.com/gke-nodepool: mine}",
            ],
            "kubectl --namespace default ",
            "create -f jobset.yaml\n",
            ["tracker.project=$$(A)", "value: hello", "cloud.google.com/gke-nodepool"],
        ),
        (
            [
                *("cluster=skypilot", "cluster.accelerators=H100:8"),
                "cluster.merge={resources: {disk_size: 512}}",
                "cluster.secrets={A_B: C}",
            ],
            'export A_B="$C"\nsky jobs launch --name ',
            "/out/task.yaml\n",
            # What asks it to stop is looked for where `action=stop` would put it.
            ["disk_size: 512", "--folder s3://nowhere/runs/a/launch/by-hand "],
        ),
        (
            ["cluster=tpu_vm", "cluster.target=v6e-8", "cluster.zone=us-a"],
            "gcloud compute tpus queued-resources create ",
            "\n",
            ["-P -m train", "'tracker.project=$(A)'", "export SAID=hello"],
        ),
    ],
)
def test_through_the_door(tmp_path, arguments, start, end, held):
    """Presets, tables on the command line, and no store or cluster asked."""
    pytest.importorskip("s3fs")
    own = ["action=render", "run.dir=s3://nowhere/runs/a", f"output={tmp_path}/out"]
    own += ["cluster.environment.SAID=hello", "tracker.project=$(A)"]
    own += ["plan_first=false"]
    said = says(tmp_path, *arguments, *own, environment={"PATH": "/nowhere"})
    first, _, output = said.partition("\n")
    assert first.startswith("# No plan was made (plan_first=false): ")
    assert output.startswith(start)
    assert output.endswith(end)
    files = [file for file in (tmp_path / "out").iterdir() if file.suffix != ".gz"]
    text = "".join(file.read_text() for file in files if file.name != "unpack.py")
    assert all(words in text for words in held), text
