"""`cluster=tpu_vm` through the door, with real training on the VMs of a fake gcloud.

Four VMs of two slices; JAX finds them by metadata servers, as on Cloud TPU.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drills.ground import check_equal
from tests.fleet import free_port
from tests.launch import fake_gcloud
from tests.launch.hostile import program
from tests.launch.launched import STEPS, LaunchedRun
from tests.metadata import AS_ON_A_TPU_VM, metadata_server

pytestmark = pytest.mark.slow

VMS = 4
WAITS = ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]


@pytest.fixture
def cloud(tmp_path) -> Iterator[Path]:
    """Give the folder of a service whose VMs have metadata servers."""
    cloud = tmp_path / "cloud"
    fake_gcloud.install(cloud, [WAITS])
    as_there = f'shift 3; exec {sys.executable} -P -c "{AS_ON_A_TPU_VM}" "$@"'
    program(cloud / "bin/python-of-the-vm", f"#!/bin/sh\n{as_there}\n")
    port = {"JAX_COORDINATOR_PORT": f"{free_port()}", "JAX_FORCE_TPU_INIT": "1"}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(metadata_server(n)) for n in range(VMS)]
        vms = [{**port, "GCE_METADATA_IP": server} for server in servers]
        (cloud / "env.json").write_text(json.dumps(vms))
        yield cloud
        for vm in (cloud / "vm").glob("*"):
            fake_gcloud.end_vm(cloud, vm.name)


def pids(cloud: Path) -> list[str]:
    """Give what run.sh knows of the processes, VM by VM."""
    return sorted(f.read_text() for f in cloud.glob("vm/*/*/*/process-0/pid"))


def test_preempted_orphaned_stopped_and_resumed(cloud, tmp_path):
    """The curve and the arrays are those of the run that nothing disturbed."""
    kind = (
        *("cluster=tpu_vm", "cluster.target=v4-16x2", "cluster.zone=us-a"),
        *("cluster.spot=true", "cluster.code=shared", "cluster.poll_s=0.3"),
        *(f"cluster.python={cloud}/bin/python-of-the-vm", "plan_first=false"),
    )
    path = f"{cloud}/path:{os.environ['PATH']}"
    own = {"FAKE_GCLOUD": str(cloud), "PATH": path}
    run = LaunchedRun(tmp_path / "x", *kind, "cluster.detach=true", environment=own)
    run.submit()
    run.await_steps()
    [name] = fake_gcloud.resources(cloud)
    log = (run.submission(1) / "process-0.log").read_text()
    assert f"devices     {VMS} x cpu" in log

    fake_gcloud.preempt(cloud, name)  # spot machines are taken away
    run.await_attempts()
    run.await_steps()
    status = run.verb("status")
    assert "queued resource: ACTIVE" in status
    assert "exit codes lost, lost, lost, lost: again" in status
    assert "SUSPENDED: by the service" in status

    before = pids(cloud)
    assert len(before) == VMS
    run.kill_supervisor(1)  # the machine that watches goes down
    run.await_steps()
    assert "not kept running" in run.verb("status")
    run.verb("resume")
    run.await_that(lambda: (run.submission(2) / "process-0.log").exists())
    run.await_steps()
    assert pids(cloud) == before  # nothing was started again

    run.verb("stop")
    stopped = run.run.step
    assert run.run.sealed()[-1] == stopped < STEPS
    assert "130, 130, 130, 130: the last" in run.verb("status")
    assert not fake_gcloud.resources(cloud)

    run.verb("resume")
    assert f"finished    {STEPS} steps" in run.verb("logs", "follow=true")
    run.await_that(lambda: not fake_gcloud.resources(cloud))
    created = [call[3] for call in fake_gcloud.calls(cloud)].count("create")
    assert created == 3
    check_equal(run.run, run.straight(VMS), STEPS)
