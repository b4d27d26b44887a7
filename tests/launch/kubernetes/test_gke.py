"""`cluster=gke_tpu` and `cluster=gke_gpu`: what is rendered, and what it would do."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.config import GkeGpuCluster, schema_of
from launch.job import Job
from launch.kubernetes import gke_gpu, gke_tpu
from launch.kubernetes.jobset import FILE
from launch.kubernetes.spot import warn_of_short_notice
from launch.manifest import merged, to_yaml
from launch.policy import Verdict, judge
from tests.fleet import REPOSITORY, TINY, free_port
from tests.launch.controllers import Pod, after, refused
from tests.launch.hostile import VALUES, argument_printer, printed
from tests.launch.test_backend import CLUSTERS, GPU, JOB, TPU, render
from train.cli.command import check_command_line
from train.cli.quoting import hydra_text, quote_text
from train.errors import ConfigError
from train.hardware.targets import parse_target

TIMEOUT_S = 600  # of four processes, on a machine that has other work


def manifest(cluster: Any, job: Job = JOB) -> dict[str, Any]:
    return yaml.safe_load(render(cluster, job).files[FILE])


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job["template"]["spec"]


def test_the_schemas_are_strict():
    document = manifest(TPU)
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
        ("v5e-1", "1x1", 1, 1, 1),
        ("v5e-8", "2x4", 8, 1, 1),
        ("v5e-16", "4x4", 4, 4, 1),
        ("v5e-256x4", "16x16", 4, 64, 4),
        ("v6e-64", "8x8", 4, 16, 1),
        ("v4-8", "2x2x1", 4, 1, 1),
        ("v4-16x2", "2x2x2", 4, 2, 2),
        ("v5p-512x4", "4x8x8", 4, 64, 4),
        ("tpu7x-128", "4x4x4", 4, 16, 1),
    ],
)
def test_slices_are_asked_for_by_name(target, topology, chips, pods, jobs):
    document = manifest(replace(TPU, target=target))
    (replicated,) = document["spec"]["replicatedJobs"]
    job, pod = replicated["template"]["spec"], pod_of(document)
    labels = pod["nodeSelector"]
    family = target.partition("-")[0]
    accelerator = labels["cloud.google.com/gke-tpu-accelerator"]
    assert accelerator == gke_tpu.ACCELERATORS[family]
    assert labels["cloud.google.com/gke-tpu-topology"] == topology
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": chips}}
    assert (job["parallelism"], job["completions"]) == (pods, pods)
    assert replicated["replicas"] == jobs
    assert parse_target(target).num_chips == jobs * pods * chips
    # A node pool is one slice only where a slice has several hosts.
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


@pytest.mark.parametrize(
    ("staged", "events", "said"),
    [
        (None, "", None),
        (14 << 30, "", "takes some 15 s, estimated"),
        (13 << 30, "", None),
        (1, '{"event": "save", "seconds": 16.2}\n', "took 16 s in this run"),
        (14 << 30, '{"event": "save", "seconds": 3}\n{"event": "step"}\n', None),
        (14 << 30, '{"event": "save", "sec', "estimated"),
    ],
)
def test_a_notice_too_short_to_save_in_is_said(tmp_path, caplog, staged, events, said):
    (tmp_path / "events.jsonl").write_text(events)
    warn_of_short_notice(replace(JOB, run_dir=str(tmp_path), staged_bytes=staged))
    assert (said is not None) == ("15 s, but a save" in caplog.text)
    assert (said or "") in caplog.text


@pytest.mark.parametrize("cluster", [TPU, GPU])
def test_every_exit_code_means_what_it_means_elsewhere(cluster):
    document = manifest(cluster)
    action = {
        Verdict.done: "completed",
        Verdict.stop: "FailJobSet",
        Verdict.again: "RestartJobSetAndIgnoreMaxRestarts",
        Verdict.crashed: "RestartJobSet",  # counted
    }
    for code in (*range(256), None):
        assert after(document, code) == action[judge([code])[0]], code


@pytest.mark.parametrize("name", [name for name in CLUSTERS if "gke" in name])
def test_as_little_leave_as_possible(name):
    cluster = CLUSTERS[name]
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


@pytest.mark.parametrize("cluster", [TPU, GPU, replace(GPU, processes_per_node=8)])
def test_hostile_values_arrive(cluster, tmp_path):
    """One argument each of the program that trains, whatever the kubelet expands."""
    overrides = tuple(hydra_text("tracker.project", value) for value in VALUES)
    job = replace(JOB, overrides=overrides, environment={"V": "$(HOME) $$ $A"})
    pod = Pod(manifest(cluster, job))
    pod.variables |= {"POD_NAME": "gone", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    argument_printer(tmp_path)
    subprocess.run(pod.command, env=pod.variables, check=True)
    (arguments,) = printed(tmp_path)
    assert tuple(arguments[-len(overrides) :]) == overrides
    assert arguments[-len(overrides) - 1] == "train"
    assert pod.variables["V"] == "$(HOME) $$ $A"


MORE = """
metadata: {labels: {team: a}}
spec:
  failurePolicy: {maxRestarts: 7, restartStrategy: null}
  replicatedJobs:
  - name: node
    template: {spec: {template: {spec: {tolerations: [], containers: [
      {name: train, env: [{name: X}]}, {name: side, image: other}]}}}}
"""


def test_what_is_merged_has_the_last_word():
    more = yaml.safe_load(MORE)
    plain = manifest(GPU)
    document = manifest(replace(GPU, merge=more))
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
    assert merged({"a": 1}, {"b": {"c": None, "d": 1}}) == {"a": 1, "b": {"d": 1}}


def test_yaml_is_read_alike_by_all():
    words = ["y", "No", "on", "1e3", "0o14", "012", "1_000", "~", "2001-01-01", "1:30"]
    text = to_yaml({"words": [*words, *VALUES]})
    assert yaml.safe_load(text) == {"words": [*words, *VALUES]}
    for word in words:
        assert f'"{word}"' in text


def test_a_run_lies_where_pods_see_it():
    mount = {"containers": [{"name": "train", "volumeMounts": [{"mountPath": "/nfs"}]}]}
    mounted = replace(GPU, merge={"spec": mount})
    assert gke_gpu.mistakes(mounted, "/nfs/runs/a") == []
    for cluster, folder in ((GPU, "/nfs/runs/a"), (mounted, "/nfsx/a")):
        (mistake,) = gke_gpu.mistakes(cluster, folder)
        assert mistake.key == "run.dir"


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("cluster.secrets={A: [1]}", "cluster.secrets.A = [1]"),
        ("cluster.merge=3", "must be a table"),
        ("cluster.environ={A: b}", "did you mean cluster.environment?"),
        ("cluster.processes=2", "did you mean cluster.processes_per_node?"),
    ],
)
def test_tables_take_any_entry_of_the_right_kind(argument, said):
    schema = schema_of("gke_gpu")
    good = ["cluster=gke_gpu", "cluster.environment.A=b", "cluster.merge.spec.a=1"]
    good += ["model=gpt_nano", "cluster.node_selector={x.y/z: v}"]
    how: Any = ("launch", schema, lambda config: [], ["cluster=gke_gpu"])
    check_command_line(quote_text(good, schema), *how)
    with pytest.raises(ConfigError) as error:
        check_command_line(quote_text([*good, argument], schema), *how)
    assert said in str(error.value)
    assert str(error.value).startswith("1 mistake ")


def trains(
    pods: list[Pod], injected: Callable[[int], dict[str, str]], expected: int
) -> None:
    """Start the pods' processes here; they must be one run."""
    started = []
    for number, pod in enumerate(pods):
        here = {
            name: value.replace(pods[0].hostname, "localhost")
            for name, value in pod.variables.items()
        }
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        env |= {**here, **injected(number)}
        started.append(
            subprocess.Popen(
                pod.command, env=env, text=True, stdout=-1, stderr=subprocess.STDOUT
            )
        )
    try:
        said = "\n".join(
            process.communicate(timeout=TIMEOUT_S)[0] for process in started
        )
    finally:
        for process in started:
            process.kill()
    assert {process.returncode for process in started} == {0}, said
    assert said.count(f"devices     {expected} x cpu") == 1, said
    assert said.count("finished    6 steps") == 1, said


def tiny(folder: Path) -> Job:
    source = Path(yaml.__file__).parent.joinpath("scanner.py").read_text()
    (folder / "text.txt").write_text(source)
    data = (f"data.path={folder}/text.txt", f"data.cache_dir={folder}/cache")
    overrides = (*TINY, *data, "train.num_steps=6", f"run.dir={folder}/run")
    return replace(JOB, overrides=overrides)


@pytest.mark.slow
def test_pods_of_two_slices_find_each_other(tmp_path):
    """With what GKE's webhook gives each pod of a Job that asks for TPUs."""
    document = manifest(replace(TPU, target="v4-16x2"), tiny(tmp_path))
    pods = [Pod(document, job, index) for job in (0, 1) for index in (0, 1)]
    port = str(free_port())

    def injected(number: int) -> dict[str, str]:
        return {
            "TPU_WORKER_HOSTNAMES": "localhost,127.0.0.1",
            "TPU_WORKER_ID": pods[number].variables["JOB_COMPLETION_INDEX"],
            "JAX_FORCE_TPU_INIT": "1",  # or JAX asks first whether there are chips
            "JAX_COORDINATOR_PORT": port,
        }

    trains(pods, injected, 4)


@pytest.mark.slow
def test_a_host_of_tpus_is_alone(tmp_path):
    document = manifest(replace(TPU, target="v5e-8"), tiny(tmp_path))
    trains([Pod(document)], lambda number: {}, 1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_pods_of_nodes_find_each_other(tmp_path, processes):
    cluster = replace(GPU, gpus_per_node=2, processes_per_node=processes)
    document = manifest(cluster, tiny(tmp_path))
    pods = [Pod(document, 0, index) for index in (0, 1)]
    port = {"MASTER_PORT": str(free_port())}
    trains(pods, lambda number: port, 2 * processes)


ABORTS = "import os; os.abort()"


@pytest.mark.slow
def test_aborts_are_seen_where_process_1_is_another():
    """`shareProcessNamespace`: the exit code of an abort is 134 then, and only then."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("needs leave to unshare process numbers")
    python = [sys.executable, "-c", ABORTS]
    shared = [*alone, "bash", "-c", 'set +m; "$@"; echo "ended with $?"', "pause"]
    done = subprocess.run([*shared, *python], capture_output=True, text=True)
    assert "ended with 134" in done.stdout
    first = subprocess.run([*alone, *python], capture_output=True)
    assert first.returncode not in (134, -6)
