"""The verbs, with the real kubectl and a small API server (api_server.py)."""

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import submissions
from launch.job import Job
from launch.kubernetes import gke_tpu, kubectl
from launch.submissions import Submission
from tests.launch.api_server import ApiServer
from tests.launch.controllers import Pod
from tests.launch.hostile import VALUES
from tests.launch.test_backend import JOB, TPU
from train.cli.quoting import hydra_text
from train.errors import Exit

CLUSTER = replace(TPU, queue="tpus", grace_period_s=20)
NAME = JOB.name


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[ApiServer]:
    if not (program := shutil.which("kubectl")):
        pytest.skip("needs kubectl (Debian: kubernetes-client)")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").symlink_to(program)
    server = ApiServer()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", server.kubeconfig(tmp_path))
    monkeypatch.setattr(kubectl, "_LOOK_S", 0.05)
    yield server
    server.shutdown()


@pytest.fixture
def submitted(server, tmp_path) -> Submission:
    return submit(tmp_path)


def submit(folder: Path, job: Job = JOB) -> Submission:
    submission = Submission(str(folder), 1, "gke_tpu", job.name, (), str(folder))
    submission.folder.mkdir(parents=True, exist_ok=True)
    rendered = gke_tpu.render(job, CLUSTER)
    assert gke_tpu.submit(job, CLUSTER, rendered, submission) == 0
    return submissions.submitted(submission.run_dir)


def a_pod(server: ApiServer, name: str, index: int = 0, **status: Any) -> None:
    labels = {
        "jobset.sigs.k8s.io/jobset-name": NAME,
        "jobset.sigs.k8s.io/job-index": "0",
        "batch.kubernetes.io/job-completion-index": f"{index}",
    }
    meta = {"name": name, "namespace": "default", "labels": labels}
    meta["creationTimestamp"] = f"2026-01-01T00:00:0{len(server.objects['pods'])}Z"
    spec = {"containers": [{"name": "train", "image": "i"}]}
    about = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    server.objects["pods"][name] = {**about, "status": status}


def ended(code: int, reason: str = "Error") -> list[dict[str, Any]]:
    state = {"terminated": {"exitCode": code, "reason": reason}}
    about = {"name": "train", "ready": False, "restartCount": 0}
    return [{**about, "image": "i", "imageID": "", "state": state}]


def test_what_is_submitted_arrives(server, tmp_path):
    """Through YAML as kubectl reads it, and to the process as it was typed."""
    values = [value for value in VALUES if value.isprintable()]
    overrides = tuple(hydra_text("tracker.project", value) for value in values)
    submit(tmp_path, replace(JOB, overrides=overrides))
    arrived = server.objects["jobsets"][NAME]
    assert tuple(Pod(arrived).command[-len(values) :]) == overrides
    assert arrived["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tpus"


def test_a_job_that_runs_is_left_alone_and_one_that_is_over_replaced(server, tmp_path):
    submission = submit(tmp_path)
    assert gke_tpu.alive(submission)
    with pytest.raises(Exit, match="already exists"):
        submit(tmp_path)
    server.objects["jobsets"][NAME]["status"] = {"terminalState": "Failed"}
    assert not gke_tpu.alive(submission)
    submit(tmp_path)
    assert gke_tpu.alive(submission)
    assert [method for method, _, _ in server.asked].count("DELETE") == 1


def test_stop_deletes_it_with_its_pods(server, submitted):
    assert gke_tpu.stop(submitted) == 0
    assert not gke_tpu.alive(submitted)
    assert gke_tpu.status(submitted) == [
        "not there: it was stopped, or somebody deleted it"
    ]
    assert gke_tpu.stop(submitted) == 0  # again


def test_status_says_why_it_waits_in_the_queue(server, submitted):
    assert "queue tpus: Kueue has not taken it up (is there such a queue?)" in (
        gke_tpu.status(submitted)
    )
    jobset = server.objects["jobsets"][NAME]
    jobset["spec"]["suspend"] = True
    why = "couldn't assign flavors: insufficient unused quota for google.com/tpu, 256"
    condition = {"type": "QuotaReserved", "status": "False", "message": why}
    labels = {"kueue.x-k8s.io/job-uid": f"uid-{NAME}"}
    workload = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": "jobset-x", "namespace": "default", "labels": labels},
        "status": {"conditions": [condition]},
    }
    server.objects["workloads"]["jobset-x"] = workload
    said = gke_tpu.status(submitted)
    assert said[0] == "suspended: it waits for Kueue, or for somebody to resume it"
    assert f"queue tpus: {why}" in said
    pending = [{"metadata": {"name": "other"}}, {"metadata": {"name": "jobset-x"}}]
    pending[1] |= {"positionInLocalQueue": 1, "positionInClusterQueue": 4}
    path = "/apis/visibility.kueue.x-k8s.io/v1beta1/namespaces/default"
    server.raw[f"{path}/localqueues/tpus/pendingworkloads"] = {"items": pending}
    assert f"queue tpus: 1 before it, 4 in the cluster's: {why}" in (
        gke_tpu.status(submitted)
    )
    condition["status"] = "True"
    condition["type"] = "Admitted"
    assert "queue tpus: admitted" in gke_tpu.status(submitted)


def test_status_says_why_pods_wait(server, submitted):
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient google.com/tpu.",
    }
    a_pod(server, "p0", phase="Pending", conditions=[unschedulable])
    a_pod(server, "p1", 1, phase="Running")
    for number, reason in enumerate(("FailedScheduling", "FailedScaleUp")):
        server.objects["events"][f"e{number}"] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"e{number}", "namespace": "default"},
            "involvedObject": {"kind": "Pod", "name": "p0"},
            "reason": reason,
            "message": "GCE out of resources",
            "lastTimestamp": f"2026-01-01T00:00:0{number}Z",
        }
    said = gke_tpu.status(submitted)
    assert "pods: 1 pending, 1 running" in said
    at = said.index(
        "p0 waits: Unschedulable: "
        "0/3 nodes are available: 3 Insufficient google.com/tpu."
    )
    assert said[at + 1] == "  FailedScaleUp: GCE out of resources"
    pull = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    state = [{**ended(0)[0], "state": pull}]
    a_pod(server, "p0", phase="Pending", containerStatuses=state)
    assert "p0 waits: ImagePullBackOff: not found" in gke_tpu.status(submitted)


def test_status_says_how_it_ended(server, submitted):
    a_pod(server, "p0", phase="Failed", containerStatuses=ended(78))
    a_pod(server, "p1", 1, phase="Failed", containerStatuses=ended(137, "OOMKilled"))
    a_pod(server, "p2", 2, phase="Succeeded", containerStatuses=ended(0))
    condition = {"type": "Failed", "status": "True", "message": "rule never_again"}
    server.objects["jobsets"][NAME]["status"] = {
        "terminalState": "Failed",
        "conditions": [condition],
        "restarts": 4,
        "restartsCountTowardsMax": 1,
    }
    said = gke_tpu.status(submitted)
    assert said[:2] == [
        "failed: rule never_again",
        "restarted 4 times, 1 of at most 10 counted",
    ]
    assert "p0 ended with 78: wrong config" in said
    assert "p1 ended with 137: OOMKilled" in said
    assert not [line for line in said if line.startswith("p2")]


def test_logs_of_process_0(server, submitted, capfd):
    assert gke_tpu.logs(submitted, follow=False) == 0
    assert "no pod is there" in capfd.readouterr().err
    a_pod(server, "p1", 1, phase="Running")
    a_pod(server, "old", phase="Failed")
    a_pod(server, "new", phase="Running")
    server.logs = {"old": "before\n", "new": "step 7\n", "p1": "other\n"}
    assert gke_tpu.logs(submitted, follow=False) == 0
    assert capfd.readouterr().out == "step 7\n"


def test_logs_are_followed_through_a_restart(server, submitted, capfd):
    a_pod(server, "old", phase="Running")
    server.logs = {"old": "step 7\n", "new": "step 8\n"}
    following = threading.Thread(target=gke_tpu.logs, args=(submitted, True))
    following.start()
    said = ""
    deadline = time.monotonic() + 30
    while "step 7" not in said:
        assert time.monotonic() < deadline
        said += capfd.readouterr().out
    server.logs["old"] = ""  # all that came after the last line that was seen
    a_pod(server, "new", phase="Running")
    while "step 8" not in said:
        assert time.monotonic() < deadline
        said += capfd.readouterr().out
    server.logs["new"] = ""
    server.objects["jobsets"][NAME]["status"] = {"terminalState": "Completed"}
    following.join(30)
    assert not following.is_alive()
    since = [query for _, path, query in server.asked if path.endswith("/log")]
    assert "sinceTime" not in since[0]


def test_without_kubectl_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Exit, match="kubectl is not on the PATH"):
        submit(tmp_path)


def test_a_cluster_that_is_away_is_said(server, submitted):
    server.shutdown()
    server.server_close()
    with pytest.raises(Exit, match="kubectl get jobset failed: "):
        gke_tpu.alive(submitted)
