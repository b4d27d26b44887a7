"""Every kind of cluster: presets, golden files, mistakes and plans."""

import sys
from dataclasses import replace

import pytest
import yaml

from data.program import FOLDER
from launch import gpu_variables as gpu
from launch.config import KINDS, LocalCluster, SkypilotCluster, SlurmCluster, kind_of
from launch.config.clusters import Code
from launch.job import job_name
from launch.plan_check import Machine
from launch.submit import BACKENDS
from tests.launch.controllers import refused
from tests.launch.golden import equals_golden
from tests.launch.hostile import VALUES
from tests.launch.kinds import (
    GOLDEN,
    GPU,
    JOB,
    OTHERS,
    SKY,
    SLURM,
    SSH,
    TPU,
    TPU_VM,
    mistakes,
    render,
)
from tests.launch.launched import says
from train.cli.command import config_yaml


@pytest.mark.parametrize("name", GOLDEN)
def test_rendered_files_equal_the_golden_files(name, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    equals_golden(name, render(GOLDEN[name]))


@pytest.mark.parametrize("cluster", [*GOLDEN.values(), *OTHERS], ids=kind_of)
def test_valid_clusters_are_accepted(cluster):
    assert mistakes(cluster) == []
    jobset = render(cluster).files.get("jobset.yaml")
    assert jobset is None or refused(yaml.safe_load(jobset)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_presets_list_all_keys_with_their_defaults(kind):
    preset = yaml.safe_load((FOLDER / f"configs/cluster/{kind}.yaml").read_text())
    defaults = yaml.safe_load(config_yaml(KINDS[kind]()))
    without_effect = {"backoff_s"} if kind.startswith("gke") else set()
    assert preset == {k: v for k, v in defaults.items() if k not in without_effect}


@pytest.mark.parametrize(
    ("cluster", "changes", "key", "rule"),
    [
        (SSH, {"hosts": []}, "hosts", "must name at least one host"),
        (SSH, {"hosts": ["-oProxyCommand=x"]}, "hosts", "as host or user@host"),
        (SSH, {"hosts": ["a", "a"]}, "hosts", "must differ"),
        (SSH, {"address": "$(x)"}, "hosts", "must be a host name or an address"),
        (SSH, {"code": Code.image}, "code", "must be shared or archive"),
        (SLURM, {"time": "a day"}, "time", "[days-]hours:minutes:seconds"),
        (SLURM, {"memory": "500 GB"}, "memory", "say 500G"),
        (SLURM, {"options": {"gpus-per-task": 1}}, "options.gpus-per-task", "hides"),
        (SLURM, {"srun_options": {"nodes": 3}}, "srun_options.nodes", "cluster.nodes"),
        (SLURM, {"options": {"output": "x"}}, "options.output", "for the launcher"),
        (SLURM, {"options": {"--x": True}}, "options.--x", "without the leading --"),
        (SLURM, {"options": {"licenses": ["a"]}}, "options.licenses", "must be text"),
        (SLURM, {"gpus_per_node": None}, "gpu", "needs cluster.gpus_per_node"),
        (SLURM, {"gpu": "v5e"}, "gpu", "must be one of a100"),
        (SLURM, {"processes_per_node": 2}, "processes_per_node", "must be 1"),
        (SlurmCluster(), {"code": Code.image}, "code", "cluster.container_image"),
        (SlurmCluster(), {"container_mounts": ["/a:/a"]}, "container_mounts", "needs"),
        (TPU, {"target": None}, "target", "is required: v6e-8"),
        (TPU, {"target": "v5e-7"}, "target", "v5e comes in"),
        (TPU, {"target": "h100-8"}, "target", "is not a TPU"),
        (TPU, {"target": "v5e-8x2"}, "target", "which GKE does not join"),
        (TPU, {"image": None}, "image", "cluster.image=host/name:tag"),
        (TPU, {"code": Code.shared}, "code", "pods do not see"),
        (TPU, {"memory": "300 Gi"}, "memory", "say 200Gi"),
        (TPU, {"secrets": {"A": "B/c"}}, "secrets.A", "wandb/api-key"),
        (GPU, {"processes_per_node": 3}, "processes_per_node", "must be 1"),
        (GPU, {"gpu": "h1000"}, "gpu", "must be one of a100"),
        (TPU_VM, {"target": "tpu7x-128"}, "target", "GKE only: cluster=gke_tpu"),
        (TPU_VM, {"target": "h100-8x4"}, "target", "is not a TPU"),
        (TPU_VM, {"target": "v5e-3"}, "target", "the nearest are v5e-1 and v5e-4"),
        (TPU_VM, {"target": None}, "target", "is required: v6e-8"),
        (TPU_VM, {"zone": None}, "zone", "is required, say us-east5-b"),
        (TPU_VM, {"reserved": True}, "spot, cluster.reserved", "exclude each other"),
        (TPU_VM, {"image": "a"}, "image", "goes with cluster.code=image"),
        (TPU_VM, {"secrets": {"a b": "c"}}, "secrets", "must be a variable's name"),
        (SKY, {"cloud": None}, "region", "needs cluster.cloud"),
        (SKY, {"code": Code.shared}, "code", "must be archive or image"),
        (SKY, {"image": None}, "image", "is needed with cluster.code=image"),
        (SKY, {"secrets": {"A": "a=secret"}}, "secrets", "{WANDB_API_KEY: WANDB_"),
        (SKY, {"secrets": {"a=secret": "A"}}, "secrets", "{WANDB_API_KEY: WANDB_"),
        (SkypilotCluster(image="a/b:c"), {"image": None}, "accelerators", "say H100:8"),
    ],
)
def test_invalid_keys_are_refused(cluster, changes, key, rule):
    assert mistakes(cluster) == []
    (mistake,) = mistakes(replace(cluster, **changes))
    assert mistake.key == f"cluster.{key}"
    assert rule in mistake.rule
    assert "a=secret" not in str(mistake.value)


@pytest.mark.parametrize("cluster", [TPU, GPU, TPU_VM, SKY], ids=kind_of)
def test_run_dir_must_be_visible_to_the_machines(cluster):
    (mistake,) = mistakes(cluster, "/runs/a")
    assert mistake.key == "run.dir"
    assert f"cluster={kind_of(cluster)} " in mistake.rule
    assert "give run.dir=gs://bucket/runs/name" in mistake.rule


@pytest.mark.parametrize(
    ("cluster", "machine"),
    [
        (LocalCluster(), Machine()),
        (SLURM, Machine("h100-8x4", variables=gpu.job_variables({}))),
        (replace(SLURM, gpu=None), Machine(devices=32)),
        (SlurmCluster(nodes=4), Machine()),
        (TPU, Machine("v5p-64x2")),
        (GPU, Machine("h100-8x2", variables=gpu.job_variables({}))),
        (TPU_VM, Machine("v6e-256x2")),
        (SKY, Machine("a100-8x4", variables=gpu.job_variables({}))),
        (SkypilotCluster(accelerators="L4:3", nodes=2), Machine(devices=6)),
        (SkypilotCluster(), Machine()),
    ],
)
def test_the_plan_is_made_for_the_machine(cluster, machine):
    assert BACKENDS[kind_of(cluster)].machine(cluster) == machine


@pytest.mark.parametrize("value", VALUES)
def test_hostile_names_of_runs_render_valid_documents(value):
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
            [
                "tracker.wandb.project=$$(A)",
                "value: hello",
                "cloud.google.com/gke-nodepool",
            ],
        ),
        (
            [
                *("cluster=skypilot", "cluster.accelerators=H100:8"),
                "cluster.merge={resources: {disk_size: 512}}",
                "cluster.secrets={A_B: C}",
            ],
            'export A_B="$C"\nsky jobs launch --name ',
            "/out/task.yaml\n",
            # The job looks for a stop request where `action=stop` would put it.
            ["disk_size: 512", "--folder s3://nowhere/runs/a/launch/by-hand "],
        ),
    ],
)
def test_render_asks_no_store_and_no_cluster(tmp_path, arguments, start, end, held):
    """The command renders presets and tables without a PATH or a reachable store."""
    pytest.importorskip("s3fs")
    keys = ["action=render", "run.dir=s3://nowhere/runs/a", f"output={tmp_path}/out"]
    keys += ["cluster.environment.SAID=hello", "tracker.wandb.project=$(A)"]
    keys += ["plan_first=false"]
    stdout = says(tmp_path, [*arguments, *keys], environment={"PATH": "/nowhere"})
    first, _, output = stdout.partition("\n")
    assert first.startswith("# No plan was made (plan_first=false): ")
    assert output.startswith(start)
    assert output.endswith(end)
    files = [file for file in (tmp_path / "out").iterdir() if file.suffix != ".gz"]
    text = "".join(file.read_text() for file in files if file.name != "unpack.py")
    assert all(words in text for words in held), text
