"""`cluster=gke_tpu` and `cluster=gke_gpu`: rendered JobSets and how they behave."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from launch.config import GkeGpuCluster, GkeTpuCluster, kind_of
from launch.kubernetes import gke_gpu
from launch.manifest import merge_values, to_yaml
from launch.policy import Verdict, judge
from tests.fleet import REPOSITORY
from tests.launch.controllers import after, refused
from tests.launch.hostile import VALUES
from tests.launch.kinds import GOLDEN, GPU, JOB, OTHERS, TPU, manifest
from train.hardware.targets import parse_target


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job["template"]["spec"]


def test_the_schemas_are_strict():
    document = manifest(TPU)
    assert refused(document) == []
    pod_of(document)["securityContext"]["runAsRoot"] = False
    document["spec"]["replicatedJobs"][0]["replicas"] = "2"
    document["spec"]["failurePolicy"]["rules"][0]["action"] = "Fail"
    assert len(refused(document)) == 3


def test_the_sample_of_kueue_is_accepted():
    documents = list(yaml.safe_load_all((REPOSITORY / "docs/kueue.yaml").read_text()))
    kinds = [document["kind"] for document in documents]
    assert kinds == ["ResourceFlavor", "ClusterQueue", "LocalQueue"]
    assert [refused(document) for document in documents] == [[], [], []]
    selector = pod_of(manifest(replace(TPU, target="v5e-256")))["nodeSelector"]
    assert documents[0]["spec"]["nodeLabels"] == selector


@pytest.mark.parametrize(
    ("target", "topology", "chips", "pods", "jobs"),
    [
        ("v5e-8", "2x4", 8, 1, 1),
        ("v5e-256x4", "16x16", 4, 64, 4),
        ("v4-8", "2x2x1", 4, 1, 1),
        ("v5p-512x4", "4x8x8", 4, 64, 4),
        ("tpu7x-128", "4x4x4", 4, 16, 1),
    ],
)
def test_a_target_asks_for_its_slices(target, topology, chips, pods, jobs):
    document = manifest(replace(TPU, target=target))
    (replicated,) = document["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = pod_of(document)
    labels = pod["nodeSelector"]
    assert labels["cloud.google.com/gke-tpu-topology"] == topology
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": chips}}
    assert (job["parallelism"], job["completions"]) == (pods, pods)
    assert replicated["replicas"] == jobs
    assert parse_target(target).num_chips == jobs * pods * chips
    # A node pool is one slice only if a slice has several hosts.
    assert ("annotations" in document["metadata"]) == (pods > 1)


@pytest.mark.parametrize(
    ("cluster", "requests"),
    [
        (TPU, {"cpu": "32", "memory": "56Gi"}),  # 4 + 2 * 18 + 16
        (replace(GPU, processes_per_node=8), {"cpu": "64", "memory": "168Gi"}),
        (replace(GPU, cpus=3, memory="9Gi"), {"cpu": "3", "memory": "9Gi"}),
    ],
)
def test_cores_and_memory_are_those_of_the_plan(cluster, requests):
    job = replace(JOB, staged_bytes=18 << 30, held_bytes=4 << 30)
    planned = manifest(cluster, job)
    assert pod_of(planned)["containers"][0]["resources"]["requests"] == requests
    assert refused(planned) == []
    plain = manifest(replace(cluster, cpus=None, memory=None))
    assert pod_of(plain)["containers"][0]["resources"].keys() == {"limits"}


@pytest.mark.parametrize("cluster", [TPU, GPU])
def test_every_exit_code_means_what_the_policy_says(cluster):
    document = manifest(cluster)
    action = {
        Verdict.done: "completed",
        Verdict.stop: "FailJobSet",
        Verdict.again: "RestartJobSetAndIgnoreMaxRestarts",
        Verdict.crashed: "RestartJobSet",  # this restart counts
    }
    for code in (*range(256), None):
        assert after(document, code) == action[judge([code])[0]], code


@pytest.mark.parametrize(
    "cluster",
    [
        cluster
        for cluster in (*GOLDEN.values(), *OTHERS)
        if isinstance(cluster, GkeTpuCluster | GkeGpuCluster)
    ],
    ids=kind_of,
)
def test_pods_have_as_few_rights_as_possible(cluster):
    pod = pod_of(manifest(cluster))
    account = cluster.service_account is not None
    assert pod["automountServiceAccountToken"] is account
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["shareProcessNamespace"] is True
    assert not {"hostPID", "hostIPC", "initContainers"} & pod.keys()
    if isinstance(cluster, GkeGpuCluster):
        assert pod["securityContext"]["runAsNonRoot"] is True


MORE = """
metadata: {labels: {team: a}}
spec:
  failurePolicy: {maxRestarts: 7, restartStrategy: null}
  replicatedJobs:
  - name: node
    template: {spec: {template: {spec: {tolerations: [], containers: [
      {name: train, env: [{name: X}]}, {name: side, image: other}]}}}}
"""


def test_merged_values_override_rendered_ones():
    overrides = yaml.safe_load(MORE)
    plain = manifest(GPU)
    document = manifest(replace(GPU, merge=overrides))
    labels = plain["metadata"]["labels"]
    assert document["metadata"]["labels"] == {**labels, "team": "a"}
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert "restartStrategy" not in document["spec"]["failurePolicy"]
    pod = pod_of(document)
    assert pod["tolerations"] == []
    train, side = pod["containers"]
    assert train["env"] == [*pod_of(plain)["containers"][0]["env"], {"name": "X"}]
    assert train["command"] == pod_of(plain)["containers"][0]["command"]
    assert side == {"name": "side", "image": "other"}
    assert merge_values({"a": 1}, {"b": {"c": None, "d": 1}}) == {"a": 1, "b": {"d": 1}}


def test_every_reader_of_yaml_reads_the_same_words():
    words = ["y", "No", "on", "1e3", "0o14", "012", "1_000", "~", "2001-01-01", "1:30"]
    text = to_yaml({"words": [*words, *VALUES]})
    assert yaml.safe_load(text) == {"words": [*words, *VALUES]}
    for word in words:
        assert f'"{word}"' in text


def test_run_dir_must_be_on_a_volume_that_pods_mount():
    mount = {"containers": [{"name": "train", "volumeMounts": [{"mountPath": "/nfs"}]}]}
    mounted = replace(GPU, merge={"spec": mount})
    assert gke_gpu.cluster_mistakes(mounted, "/nfs/runs/a") == []
    for cluster, folder in ((GPU, "/nfs/runs/a"), (mounted, "/nfsx/a")):
        (mistake,) = gke_gpu.cluster_mistakes(cluster, folder)
        assert mistake.key == "run.dir"
