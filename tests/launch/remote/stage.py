"""A run on simulated machines, for tests of `cluster=ssh` and `cluster=tpu_vm`."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launch.config import SshCluster, TpuVmCluster
from launch.config.clusters import Code
from launch.job import Job
from launch.remote import ssh, tpu_vm
from launch.submissions import Submission, write_submission
from tests.launch import fake_gcloud, fake_ssh
from tests.launch.hostile import program

PATIENCE_S = 120
NOTHING: Mapping[str, str] = MappingProxyType({})
SSH = SshCluster(hosts=["n0", "me@n1"], python="trainer", poll_s=0.05)
SSH = replace(SSH, backoff_s=0.01, max_restarts=2)
TPU = TpuVmCluster(target="v6e-8", zone="us-a", setup=[], poll_s=0.05)  # one VM
TPU = replace(TPU, python="trainer", code=Code.shared, backoff_s=0.01, max_restarts=2)

# This program replaces training. It writes down its ranks, and obeys the next line of
# $STUB/plan.
TRAINER = r"""#!/usr/bin/env bash
me="${FAKE_HOST-}${FAKE_VM-}-${RANK-0}"
count=$(($(cat "$STUB/count-$me" 2>/dev/null) + 1))
echo "$count" >"$STUB/count-$me"
end() { echo "saved"; exit "$1"; }
trap 'end 130' INT
trap 'end 42' TERM
echo "${RANK-} ${LOCAL_RANK-} ${WORLD_SIZE-} ${LOCAL_WORLD_SIZE-} ${MASTER_ADDR-}" \
  "${MASTER_PORT-}" >"$STUB/place-${RANK-0}"
echo "start $count"
what=$(sed -n "${count}p" "$STUB/plan")
while [ "$what" = run ]; do sleep 0.05; [ -e "$STUB/finish" ] && exit 0; done
exit "${what:-0}"
"""


class Stage:
    """Machines, a run of two processes on them, and the results of that run."""

    kind: str
    backend: Any
    cluster: Any
    variable: str  # the fake finds its folder by this variable

    def __init__(self, folder: Path, *starts: object):
        self.fake = folder / "fake"
        self.stub = folder / "stub"
        self.path = self.install()
        program(self.fake / "bin/trainer", TRAINER)
        self.stub.mkdir()
        (self.stub / "plan").write_text("".join(f"{start}\n" for start in starts))
        self.job = Job(
            *("name-12345678", str(folder / "run"), f"{folder}/run/launch/1"),
            *((), str(folder / "root"), str(folder)),
        )
        name = self.job.name
        self.submission = Submission(self.job.run_dir, 1, self.kind, name, (), "")
        self.folder = Path(self.submission.folder)

    def install(self) -> Path:
        raise NotImplementedError

    def cut_off(self) -> Path:
        """Return a file; no machine answers until it is removed."""
        raise NotImplementedError

    def end(self) -> None:
        """End the processes that still run."""
        (self.stub / "finish").touch()

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.path}:{os.environ['PATH']}"
        return {self.variable: str(self.fake), "STUB": str(self.stub), "PATH": path}

    def kept(self, cluster: Any = None, files: Mapping[str, str] = NOTHING) -> Any:
        """Return a recorded submission without a supervisor."""
        cluster = cluster or self.cluster
        rendered = self.backend.render(self.job, cluster)
        submission = write_submission(
            self.submission, {**rendered.files, **files}, Path("/none")
        )
        return submission.with_handle(cluster=json.loads(json.dumps(vars(cluster))))

    def submit(self, cluster: Any = None) -> int:
        cluster = cluster or self.cluster
        rendered = self.backend.render(self.job, cluster)
        write_submission(self.submission, rendered.files, Path("/none"))
        return self.backend.submit(self.job, cluster, rendered, self.submission)

    @property
    def codes(self) -> list[list[int | None]]:
        lines = (self.folder / "attempts.jsonl").read_text().splitlines()
        return [json.loads(line)["codes"] for line in lines]

    def starts(self) -> list[int]:
        """Count the starts of each process."""
        return [int(file.read_text() or 0) for file in self.stub.glob("count-*")]

    def calls(self) -> list[list[str]]:
        return fake_gcloud.calls(self.fake)

    def later(
        self, holds: Callable[[], object], act: Callable[[], object]
    ) -> threading.Thread:
        """Act in another thread as soon as the condition holds."""

        def run() -> None:
            until(holds)
            act()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


class SshStage(Stage):
    kind = "ssh"
    backend = ssh
    cluster = SSH
    variable = "FAKE_SSH"

    def install(self) -> Path:
        return fake_ssh.install(self.fake)

    def cut_off(self, host: str = "all", why: str = "") -> Path:
        file = self.fake / "off" / host
        file.write_text(why)
        return file

    def pid(self, host: str, process: int) -> Path:
        folder = self.fake / f"home/{host}/longhaul/{self.job.name}"
        return folder / f"process-{process}/pid"


class TpuStage(Stage):
    kind = "tpu_vm"
    backend = tpu_vm
    variable = "FAKE_GCLOUD"
    cluster = replace(TPU, target="v4-16")  # two VMs

    def __init__(self, folder: Path, *starts: object, plan: Any = (("ACTIVE",),)):
        self.plan = [list(states) for states in plan]
        super().__init__(folder, *starts)

    def install(self) -> Path:
        return fake_gcloud.install(self.fake, self.plan)

    def cut_off(self) -> Path:
        (self.fake / "offline").touch()
        return self.fake / "offline"

    def end(self) -> None:
        for vm in (self.fake / "vm").glob("*"):
            fake_gcloud.end_vm(self.fake, vm.name)

    def verbs(self) -> list[str]:
        return [call[3] for call in self.calls()]

    @property
    def left(self) -> list[str]:
        return fake_gcloud.resources(self.fake)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
