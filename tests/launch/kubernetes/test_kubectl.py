"""The verbs of JobSets, with a kubectl whose cluster is a file."""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import submissions
from launch.job import Job
from launch.kubernetes import gke_tpu, kubectl
from launch.submissions import Submission
from tests.launch.controllers import Pod
from tests.launch.hostile import VALUES, program
from tests.launch.kinds import JOB, TPU
from train.cli.quoting import hydra_text
from train.errors import Exit

CLUSTER = replace(TPU, queue="tpus", grace_period_s=20)
NAME = JOB.name
# The fake passes all words to the real kubectl with --help, which refuses unknown flags
# first. The real kubectl also parses the manifest, since readers of YAML differ.
FAKE = """#!{python}
import json, subprocess, sys
words, file = sys.argv[1:], {file!r}
subprocess.run([{kubectl!r}, *words, "--help"], check=True, capture_output=True)
assert words[:2] == ["--namespace", "default"]
verb, *words = words[2:]
cluster = json.load(open(file))
if verb == "create":
    command = [{kubectl!r}, "label", "--local", "-f", "-", "x=y", "-ojson"]
    new = json.loads(subprocess.run(command, stdout=-1, check=True).stdout)
    name = new["metadata"]["name"]
    if name in cluster["jobset"]:
        sys.exit(name + " already exists")
    new["metadata"]["uid"] = "uid-" + name
    cluster["jobset"][name] = new
elif verb == "delete":
    cluster["jobset"].pop(words[1], None)
elif verb == "logs":
    print(cluster["logs"].get(words[0], ""), end="")
elif words[0] == "jobset":
    print(json.dumps(cluster["jobset"].get(words[1], "")).strip('"'))
else:
    wanted = [w.split("=") for w in words[2].split(",")]
    fits = lambda item: all(item["labels"].get(k) == v for k, v in wanted)
    items = [item for item in cluster[words[0]] if fits(item)]
    print(json.dumps(dict(items=items)))
if verb in ("create", "delete"):
    json.dump(cluster, open(file, "w"))
"""


class Cluster:
    """The state of the fake kubectl, in a file."""

    def __init__(self, file: Path):
        self.file = file
        lists = ("pods", "events", "workloads.kueue.x-k8s.io")
        with self.change(new={"jobset": {}, "logs": {}, **{k: [] for k in lists}}):
            pass

    @contextmanager
    def change(self, new: Any = None) -> Iterator[Any]:
        cluster = new or json.loads(self.file.read_text())
        yield cluster
        self.file.with_suffix(".new").write_text(json.dumps(cluster))
        self.file.with_suffix(".new").replace(self.file)

    def add(self, kind: str, labels: dict[str, str], **more: Any) -> None:
        with self.change() as cluster:
            cluster[kind].append({"labels": labels, **more})

    def add_pod(self, name: str, index: int = 0, **status: Any) -> None:
        labels = {
            "jobset.sigs.k8s.io/jobset-name": NAME,
            "jobset.sigs.k8s.io/job-index": "0",
            "batch.kubernetes.io/job-completion-index": f"{index}",
        }
        created = f"2026-01-01T00:00:{time.monotonic_ns()}Z"
        metadata = {"name": name, "creationTimestamp": created}
        self.add("pods", labels, metadata=metadata, status=status)


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Cluster:
    if not (real := shutil.which("kubectl")):
        pytest.skip("needs kubectl (Debian: kubernetes-client)")
    file = tmp_path / "cluster.json"
    text = FAKE.format(python=sys.executable, file=str(file), kubectl=real)
    program(tmp_path / "bin/kubectl", text)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(kubectl, "_POLL_S", 0.05)
    return Cluster(file)


@pytest.fixture
def submitted(cluster, tmp_path) -> Submission:
    return submit(tmp_path)


def submit(folder: Path, job: Job = JOB) -> Submission:
    submission = Submission(str(folder), 1, "gke_tpu", job.name, (), str(folder))
    submission.folder.mkdir(parents=True, exist_ok=True)
    rendered = gke_tpu.render(job, CLUSTER)
    assert gke_tpu.submit(job, CLUSTER, rendered, submission) == 0
    return submissions.require_submission(submission.run_dir)


def container_statuses(code: int, reason: str = "Error") -> list[dict[str, Any]]:
    return [{"state": {"terminated": {"exitCode": code, "reason": reason}}}]


def test_submitted_values_arrive_verbatim(cluster, tmp_path):
    """Values survive YAML as kubectl reads it, and reach the process unchanged."""
    values = [value for value in VALUES if value.isprintable()]
    overrides = tuple(hydra_text("tracker.wandb.project", value) for value in values)
    submit(tmp_path, replace(JOB, overrides=overrides))
    with cluster.change() as state:
        jobset = state["jobset"][NAME]
    assert tuple(Pod(jobset).command[-len(values) :]) == overrides
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tpus"


def test_a_running_job_is_left_alone_and_a_finished_one_is_replaced(cluster, tmp_path):
    submission = submit(tmp_path)
    assert gke_tpu.alive(submission)
    with pytest.raises(Exit, match="already exists"):
        submit(tmp_path)
    with cluster.change() as state:
        state["jobset"][NAME]["status"] = {"terminalState": "Failed"}
    assert not gke_tpu.alive(submission)
    submit(tmp_path)
    assert gke_tpu.alive(submission)
    assert gke_tpu.stop(submission) == 0
    assert not gke_tpu.alive(submission)
    assert gke_tpu.stop(submission) == 0  # a second stop is harmless


def test_status_says_why_it_waits_in_the_queue(cluster, submitted):
    with cluster.change() as state:
        state["jobset"][NAME]["spec"]["suspend"] = True
    why = "couldn't assign flavors: insufficient unused quota for google.com/tpu, 256"
    condition = {"type": "QuotaReserved", "status": "False", "message": why}
    labels = {"kueue.x-k8s.io/job-uid": f"uid-{NAME}"}
    created = {"creationTimestamp": "2026-01-01T00:00:00Z"}
    waiting = {"metadata": created, "status": {"conditions": [condition]}}
    cluster.add("workloads.kueue.x-k8s.io", labels, **waiting)
    lines = gke_tpu.status(submitted)
    assert lines[0].startswith("suspended")
    assert f"queue tpus: {why}" in lines
    condition = {"type": "Admitted", "status": "True"}
    created = {"creationTimestamp": "2026-01-02T00:00:00Z"}
    newest = {"metadata": created, "status": {"conditions": [condition]}}
    for workload in (newest, waiting):
        cluster.add("workloads.kueue.x-k8s.io", labels, **workload)
    assert "queue tpus: admitted" in gke_tpu.status(submitted)


def test_status_says_why_pods_wait(cluster, submitted):
    why = "0/3 nodes are available: 3 Insufficient google.com/tpu."
    unschedulable = {
        **{"type": "PodScheduled", "status": "False"},
        **{"reason": "Unschedulable", "message": why},
    }
    cluster.add_pod("p0", phase="Pending", conditions=[unschedulable])
    cluster.add_pod("p1", 1, phase="Running")
    labels = {"involvedObject.kind": "Pod", "involvedObject.name": "p0"}
    times = {"FailedScaleUp": "00:00:09Z", "FailedScheduling": "00:00:01Z"}
    for reason, last_seen in times.items():
        event = {"reason": reason, "message": "GCE out of resources"}
        event["lastTimestamp"] = f"2026-01-01T{last_seen}"
        cluster.add("events", labels, metadata={"name": reason}, **event)
    lines = gke_tpu.status(submitted)
    assert "pods: 1 pending, 1 running" in lines
    position = lines.index(f"p0 waits: Unschedulable: {why}")
    assert lines[position + 1] == "  FailedScaleUp: GCE out of resources"


def test_status_says_how_it_ended(cluster, submitted):
    cluster.add_pod("p0", phase="Failed", containerStatuses=container_statuses(78))
    cluster.add_pod(
        "p1", 1, phase="Failed", containerStatuses=container_statuses(137, "OOMKilled")
    )
    cluster.add_pod("p2", 2, phase="Succeeded", containerStatuses=container_statuses(0))
    condition = {"type": "Failed", "status": "True", "message": "rule never_again"}
    with cluster.change() as state:
        state["jobset"][NAME]["status"] = {
            "terminalState": "Failed",
            "conditions": [condition],
            "restarts": 4,
            "restartsCountTowardsMax": 1,
        }
    status = gke_tpu.status(submitted)
    assert status[0] == "failed: rule never_again"
    assert "p0 ended with 78: wrong config" in status
    assert "p1 ended with 137: OOMKilled" in status
    assert not [line for line in status if line.startswith("p2")]


def test_logs_of_process_0_are_followed_through_a_restart(cluster, submitted, capfd):
    cluster.add_pod("p1", 1, phase="Running")
    cluster.add_pod("old", phase="Running")
    with cluster.change() as state:
        state["logs"] = {"old": "step 7\n", "new": "step 8\n", "p1": "other\n"}
    following = threading.Thread(target=gke_tpu.logs, args=(submitted, True))
    following.start()
    output = ""
    deadline = time.monotonic() + 120
    while "step 7" not in output:
        assert time.monotonic() < deadline
        output += capfd.readouterr().out
    cluster.add_pod("new", phase="Running")
    while "step 8" not in output:
        assert time.monotonic() < deadline
        output += capfd.readouterr().out
    with cluster.change() as state:
        state["jobset"][NAME]["status"] = {"terminalState": "Completed"}
    following.join(30)
    assert not following.is_alive()
    assert "other" not in output
