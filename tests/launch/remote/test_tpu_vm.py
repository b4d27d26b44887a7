"""`cluster=tpu_vm` against a gcloud that plays the service (fake_gcloud.py)."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml

from launch import supervisor
from launch.archive import archive
from launch.config import Code, TpuVmCluster
from launch.job import ARCHIVE, UNPACK, Job
from launch.remote import attempt, gcloud, supervise, tpu_hosts, tpu_vm
from launch.remote import queued_resource as queued
from launch.remote.gcloud import commands
from launch.submissions import Submission, keep
from launch.subprocesses import ROOT
from tests.launch import fake_gcloud
from tests.launch.golden import equals_golden
from tests.launch.hostile import VALUES, argument_printer, printed
from train.cli.quoting import hydra_text
from train.errors import Exit

CLUSTER = TpuVmCluster(target="v6e-8", zone="us-a", setup=[], poll_s=0.05)  # one VM
CLUSTER = replace(CLUSTER, code=Code.shared, backoff_s=0.01, max_restarts=2)
SLICES = replace(CLUSTER, target="v4-16x2", spot=True)  # two of two VMs
WAITS = ["WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
PATIENCE_S = 30
NOTHING: Mapping[str, str] = MappingProxyType({})

# Stands for training: does what the next line of $STUB/plan says, on each VM its own.
TRAINER = r"""#!/usr/bin/env bash
count=$(($(cat "$STUB/$FAKE_VM" 2>/dev/null) + 1))
echo "$count" >"$STUB/$FAKE_VM"
end() { echo "saved"; exit "$1"; }
trap 'end 130' INT
trap 'end 42' TERM
echo "start $count"
what=$(sed -n "${count}p" "$STUB/plan")
while [ "$what" = run ]; do sleep 0.05; [ -e "$STUB/finish" ] && exit 0; done
exit "${what:-0}"
"""


class Stage:
    """A service, a run, and what came of it."""

    def __init__(self, folder: Path, plan: list[list[str]], *starts: object):
        self.cloud = folder / "cloud"
        self.path = fake_gcloud.install(self.cloud, plan)
        fake_gcloud.program(self.cloud / "bin/python3", TRAINER)
        self.stub = folder / "stub"
        self.stub.mkdir()
        (self.stub / "plan").write_text("".join(f"{start}\n" for start in starts))
        self.job = Job(
            *("name-12345678", str(folder / "run"), f"{folder}/run/launch/1"),
            *((), str(folder / "root"), str(folder)),
        )
        self.submission = Submission(
            self.job.run_dir, 1, "tpu_vm", self.job.name, (), ""
        )

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.path}:{os.environ['PATH']}"
        return {"FAKE_GCLOUD": str(self.cloud), "STUB": str(self.stub), "PATH": path}

    def kept(
        self, cluster: TpuVmCluster = CLUSTER, files: Mapping[str, str] = NOTHING
    ) -> Submission:
        """Give the submission of a submission, which nobody watches."""
        rendered = tpu_vm.render(self.job, cluster)
        submission = keep(
            self.submission, {**rendered.files, **files}, Path("/nowhere")
        )
        return submission.with_handle(cluster=json.loads(json.dumps(vars(cluster))))

    def submit(self, cluster: TpuVmCluster = CLUSTER) -> int:
        rendered = tpu_vm.render(self.job, cluster)
        keep(self.submission, rendered.files, Path("/nowhere"))
        return tpu_vm.submit(self.job, cluster, rendered, self.submission)

    @property
    def codes(self) -> list[list[int | None]]:
        lines = (
            (Path(self.submission.folder) / "attempts.jsonl").read_text().splitlines()
        )
        return [json.loads(line)["codes"] for line in lines]

    def starts(self) -> int:
        """Count the starts of the trainer on all VMs."""
        return sum(int(f.read_text() or 0) for f in self.stub.glob("name-*"))

    def verbs(self) -> list[str]:
        return [call[3] for call in fake_gcloud.calls(self.cloud)]

    def later(self, holds: Callable[[], object], act: Callable[[], object]) -> None:
        """Act, in another thread, as soon as something holds."""

        def run() -> None:
            until(holds)
            act()

        threading.Thread(target=run, daemon=True).start()

    @property
    def left(self) -> list[str]:
        return fake_gcloud.resources(self.cloud)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def stage(tmp_path, monkeypatch) -> Iterator[Callable[..., Stage]]:
    monkeypatch.setattr(supervise, "run_step", lambda job: None)
    monkeypatch.setattr(queued, "_PAUSE_S", 0.02)
    monkeypatch.setattr(queued, "_ASK_AGAIN_S", 0.02)
    monkeypatch.setattr(supervisor, "_PAUSE_S", 0.02)
    monkeypatch.setattr(tpu_hosts, "_AGAIN_S", 0.02)
    made = []

    def make(plan: list[list[str]], *starts: object) -> Stage:
        made.append(Stage(tmp_path, plan, *starts))
        for name, value in made[-1].environment.items():
            monkeypatch.setenv(name, value)
        return made[-1]

    yield make
    for made_one in made:
        for vm in (made_one.cloud / "vm").glob("*"):
            fake_gcloud.end_vm(made_one.cloud, vm.name)


@pytest.mark.parametrize(
    ("plan", "made"),
    [
        ([WAITS], 1),
        ([["CREATING", "SUSPENDED"], ["ACTIVE"]], 2),
        ([["FAILED 13 an internal error"], ["FAILED 14 busy"], ["ACTIVE"]], 3),
        ([["!UNAVAILABLE: try again"], ["!INTERNAL: oh"], ["ACTIVE"]], 3),
        ([["DELETING", "ACTIVE"]], 1),
    ],
)
def test_machines_come_in_the_end(stage, plan, made):
    at = stage(plan, 0)
    assert at.submit() == 0
    assert at.codes == [[0]]
    assert at.verbs().count("create") == made
    assert not at.left


@pytest.mark.parametrize(
    ("plan", "code", "why"),
    [
        (["FAILED 8 Quota 'TPUV4s' exhausted. Limit 0"], 78, "Quota 'TPUV4s"),
        (["FAILED 3 no such runtime"], 78, "no such runtime"),
        (
            ["!PERMISSION_DENIED: tpu.googleapis.com is off"],
            78,
            "googleapis.com is off",
        ),
        (["!INVALID_ARGUMENT: v4-16 is not in us-a"], 78, "v4-16 is not in us-a"),
        (["!RESOURCE_EXHAUSTED: Quota limit 'X' has been exceeded"], 78, "Quota limit"),
        (["FAILED 8 There is no more capacity"], 1, "no more capacity (5 times)"),
        (["!UNAVAILABLE: nobody there"], 1, "nobody there (5 times)"),
    ],
)
def test_it_gives_up_where_that_is_all_one_can_do(stage, plan, code, why):
    at = stage([plan])
    with pytest.raises(Exit, match=re.escape(why)) as raised:
        at.submit()
    assert raised.value.code == code
    assert not at.left
    last = queued.describe_states(Path(at.submission.folder) / tpu_vm.STATES)[-1]
    assert "given up" in last
    assert why in last
    assert "ssh" not in at.verbs()


def test_it_waits_no_longer_than_it_was_told_to(stage):
    at = stage([["WAITING_FOR_RESOURCES", "FAILED 4 the valid until time has passed"]])
    with pytest.raises(Exit, match="valid until time has passed"):
        at.submit(replace(CLUSTER, valid_until="6h"))
    assert not at.left
    [create] = [call for call in fake_gcloud.calls(at.cloud) if call[3] == "create"]
    assert "--valid-until-duration=6h" in create


def test_preempted_machines_are_asked_for_again(stage):
    at = stage([["ACTIVE"], WAITS], "run", 0)
    name = at.job.name
    at.later(lambda: at.starts() == 4, lambda: fake_gcloud.preempt(at.cloud, name))
    assert at.submit(replace(SLICES, max_restarts=0)) == 0
    assert at.codes == [[None] * 4, [0] * 4]
    assert at.verbs().count("create") == 2
    assert not at.left
    states = "\n".join(
        queued.describe_states(Path(at.submission.folder) / tpu_vm.STATES)
    )
    assert re.search(r"ACTIVE\n.*SUSPEND.*\n(.*\n)*.*WAITING_FOR_RESOURCES", states)


@pytest.mark.parametrize(
    ("starts", "codes"),
    [
        ((1, 0), [1, 0]),
        ((1, 1, 1), [1, 1, 1]),
        ((78,), [78]),
        ((42, 134, 3), [42, 134, 3]),
    ],
)
def test_ends_mean_what_they_mean_everywhere(stage, starts, codes):
    at = stage([["ACTIVE"]], *starts)
    assert at.submit() == codes[-1]
    assert at.codes == [[code] for code in codes]
    assert at.verbs().count("create") == 1  # the machines were there still
    assert not at.left


def test_what_a_crash_says_is_shown(stage, caplog):
    at = stage([["ACTIVE"]], 1, 0)
    at.submit(SLICES)
    for vm in ("0-w-0", "0-w-1", "1-w-0", "1-w-1"):
        assert f"{at.job.name}-{vm}:0: start 1" in caplog.text


def test_machines_can_be_kept(stage):
    at = stage([["ACTIVE"]], 0)
    assert at.submit(replace(CLUSTER, keep=True)) == 0
    assert at.left == [at.job.name]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_it_waits_for_machines(stage):
    at = stage([["WAITING_FOR_RESOURCES"]])
    at.later(lambda: at.verbs().count("describe") > 2, interrupt)
    assert at.submit() == 130
    assert not at.left


def test_ctrl_c_leaves_no_machines_when_they_are_being_deleted(stage, monkeypatch):
    at = stage([["ACTIVE"]], 0)
    delete = queued.QueuedResource.delete

    def interrupted(resource: queued.QueuedResource) -> bool:
        interrupt()
        return delete(resource)

    monkeypatch.setattr(queued.QueuedResource, "delete", interrupted)
    assert at.submit() == 0
    assert not at.left


def test_ctrl_c_lets_the_run_save(stage, capfd):
    at = stage([["ACTIVE"]], "run")
    at.later(lambda: at.starts() == 4, interrupt)
    assert at.submit(SLICES) == 130
    assert at.codes == [[130] * 4]
    assert "saved" in capfd.readouterr().err
    assert not at.left


def test_a_broken_connection_harms_nothing(stage):
    at = stage([["ACTIVE"]], "run")
    offline = at.cloud / "offline"

    def break_for_a_while() -> None:
        offline.touch()
        time.sleep(1)
        (at.stub / "finish").touch()
        offline.unlink()

    at.later(lambda: at.starts() == 1, break_for_a_while)
    assert at.submit() == 0
    assert at.starts() == 1


def heard_of(at: Stage) -> bool:
    file = Path(at.submission.folder) / supervise.LOG
    return file.exists() and "start 1" in file.read_text()


def test_machines_that_stay_silent_are_replaced(stage, monkeypatch):
    monkeypatch.setattr(attempt, "LOST_S", 0.5)
    at = stage([["ACTIVE"]], "run", 0)
    offline = at.cloud / "offline"

    def break_for_long() -> None:
        offline.touch()
        until(lambda: (at.submission.folder / "attempts.jsonl").exists())
        offline.unlink()

    at.later(lambda: heard_of(at), break_for_long)
    assert at.submit() == 0
    assert at.codes == [[None], [0]]


def test_another_supervisor_takes_up_what_runs(stage, monkeypatch):
    """As after a crash of this machine: nothing is started or asked for twice."""
    at = stage([["ACTIVE"]], "run")

    class Gone(BaseException):
        pass

    def die(*_: object) -> None:
        raise Gone

    with monkeypatch.context() as patch:
        patch.setattr(tpu_vm.QueuedResource, "delete", lambda *_: None)
        patch.setattr(attempt.RemoteAttempt, "_pass_on", die)
        with pytest.raises(Gone):
            at.submit()
    at.later(lambda: at.verbs().count("ssh") > 6, (at.stub / "finish").touch)
    assert at.submit() == 0
    assert at.starts() == 1
    assert at.verbs().count("create") == 1
    assert not at.left


def test_stop_without_a_supervisor(stage):
    at = stage([["ACTIVE"]], "run")
    submission = at.kept()
    hosts = tpu_vm._hosts(submission)
    assert hosts.begin(attempt.Wait(), take_up=False)
    until(lambda: at.starts() == 1)
    assert "ACTIVE" in tpu_vm.status(submission)[0]
    assert tpu_vm.stop(submission) == 0
    assert "saved" in (Path(submission.folder) / supervise.LOG).read_text()
    assert not at.left
    assert "none" in tpu_vm.status(submission)[0]


def test_status_says_why_it_waits(stage):
    at = stage([["WAITING_FOR_RESOURCES"]])
    subprocess.run(commands(at.job.name, CLUSTER)["create"], check=True)
    said = tpu_vm.status(at.kept())[0]
    assert said == (
        "queued resource: WAITING_FOR_RESOURCES, 0 h 0 min after it was made"
    )


def test_the_archive_goes_along(stage):
    at = stage([["ACTIVE"]])
    submission = at.kept(
        replace(SLICES, code=Code.archive), {ARCHIVE: "archive", UNPACK: "unpack"}
    )
    argument_printer(at.cloud / "bin", "python3")
    assert tpu_vm._hosts(submission).begin(attempt.Wait(), take_up=False)
    until(lambda: (at.cloud / "bin/arguments.jsonl").exists())
    train = ["python3", "-P", "-m", "train"]
    wanted = ["./unpack.py", "./code.tar.gz", "--", *train]
    assert printed(at.cloud / "bin")[0] == wanted
    for vm in ("0-w-0", "1-w-1"):
        home = at.cloud / f"vm/{at.job.name}-{vm}/longhaul/{at.job.name}"
        assert (home / ARCHIVE).read_text() == "archive"


@pytest.mark.parametrize("image", [None, "registry/image:tag"])
def test_hostile_values_arrive_verbatim(tmp_path, image):
    environment = {f"SAID_{n}": value for n, value in enumerate(VALUES)}
    cluster = replace(CLUSTER, image=image)
    cluster = replace(cluster, code=Code.image if image else Code.archive)
    overrides = tuple(hydra_text("tracker.project", value) for value in VALUES)
    job = Job("job", "gs://a/b", "folder", overrides, "/root", "/tmp", environment)
    (tmp_path / "run.sh").write_text(tpu_vm.render(job, cluster).files["run.sh"])
    argument_printer(tmp_path / "bin", "sudo" if image else "python3")
    run_here(tmp_path)
    assert (tmp_path / "process-0/code").read_text() == "0\n"
    words = printed(tmp_path / "bin")[-1]
    train = words.index("train")
    assert words[train - 2 :] == ["-P", "-m", "train", *overrides]
    assert ("docker" in words) == (image is not None)


def test_hostile_values_of_the_environment(tmp_path):
    environment = {f"SAID_{n}": value for n, value in enumerate(VALUES)}
    job = Job("job", "/run", "folder", (), "/root", str(tmp_path), environment)
    (tmp_path / "run.sh").write_text(tpu_vm.render(job, CLUSTER).files["run.sh"])
    (tmp_path / "bin").mkdir()
    fake_gcloud.program(tmp_path / "bin/python3", "#!/bin/sh\nenv -0\n")
    run_here(tmp_path)
    told = (tmp_path / "process-0/log").read_bytes().decode().split("\0")
    assert {f"{name}={value}" for name, value in environment.items()} <= {*told}


def run_here(folder: Path, **more: str) -> None:
    """Run what `run.sh start` starts, to its end, with stubs first on the PATH."""
    path = f"{folder}/bin:{os.environ['PATH']}"
    run = ["bash", str(folder / "run.sh"), "start", "0", "1"]
    subprocess.run(run, env={**os.environ, "PATH": path, **more}, check=True)
    until(lambda: (folder / "process-0/code").exists())


def test_a_restart_gets_the_versions_of_the_archive(tmp_path):
    """Each start installs, and newer versions may be there by then."""
    job = Job("job", "gs://a/b", "folder", (), "/root", "/tmp")
    cluster = replace(CLUSTER, code=Code.archive, setup=None)
    (tmp_path / "run.sh").write_text(tpu_vm.render(job, cluster).files["run.sh"])
    (tmp_path / ARCHIVE).write_bytes(archive(ROOT))
    (tmp_path / "longhaul/venv/bin").mkdir(parents=True)
    (tmp_path / "longhaul/venv/bin/activate").touch()
    argument_printer(tmp_path / "bin", "python3")
    run_here(tmp_path, HOME=str(tmp_path))
    (install,) = [
        words for words in printed(tmp_path / "bin") if "install" in words[3:]
    ]
    constraints = tmp_path / install[install.index("--constraint") + 1]
    assert constraints.read_bytes() == (ROOT / "constraints.txt").read_bytes()


def test_secrets_are_fetched_there(tmp_path):
    cluster = replace(CLUSTER, secrets={"KEY": "it's $HOME"}, project="p")
    job = Job("job", "/run", "folder", (), "/root", str(tmp_path))
    text = tpu_vm.render(job, cluster).files["run.sh"]
    (tmp_path / "run.sh").write_text(text)
    ask = 'printf "%s\\n" "$@" >"$OUT"; echo secret'
    (tmp_path / "bin").mkdir()
    fake_gcloud.program(tmp_path / "bin/gcloud", f"#!/bin/sh\n{ask}\n")
    fake_gcloud.program(tmp_path / "bin/python3", '#!/bin/sh\necho "$KEY"\n')
    run_here(tmp_path, OUT=f"{tmp_path}/asked")
    assert (tmp_path / "process-0/log").read_text() == "secret\n"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-3:] == ["latest", "--secret=it's $HOME", "--project=p"]


def test_a_secret_that_is_not_to_be_had_ends_it(tmp_path):
    cluster = replace(CLUSTER, secrets={"KEY": "key"})
    job = Job("job", "/run", "folder", (), "/root", str(tmp_path))
    (tmp_path / "run.sh").write_text(tpu_vm.render(job, cluster).files["run.sh"])
    (tmp_path / "bin").mkdir()
    fake_gcloud.program(tmp_path / "bin/gcloud", "#!/bin/sh\nexit 78\n")
    run_here(tmp_path)
    assert (tmp_path / "process-0/code").read_text() == "1\n"


FULL = TpuVmCluster(
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
    environment={"A": "b c"},
)


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("full", FULL),
        ("one", TpuVmCluster(target="v5e-16", zone="us-west4-a")),
        (
            "image",
            replace(FULL, code=Code.image, image="registry/image:tag", target="v5p-8"),
        ),
    ],
)
def test_rendered(name, cluster):
    job = Job(
        *("base-1b-12345678", "gs://bucket/runs/base-1b", "gs://bucket/l/1"),
        *(("model=gpt_nano", 'run.dir="gs://bucket/runs/base-1b"'), "/root", "/here"),
        environment=cluster.environment,
    )
    rendered = tpu_vm.render(job, cluster)
    equals_golden(f"tpu_vm/{name}", rendered)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": "tpu7x-128"}, "GKE only: cluster=gke_tpu"),
        ({"target": "h100-8x4"}, "must be a TPU"),
        ({"target": "v5e-3"}, "v5e comes in"),
        ({"target": None}, "is required, say v6e-8"),
        ({"zone": None}, "is required, say us-east5-b"),
        ({"spot": True, "reserved": True}, "go not together"),
        ({"image": "a"}, "goes with cluster.code=image"),
        ({"secrets": {"a b": "c"}}, "must be a variable's name"),
        ({"code": Code.archive}, "give run.dir=gs://"),
    ],
)
def test_mistakes(changes, said):
    found = tpu_vm.mistakes(replace(CLUSTER, **changes), "/runs/a")
    assert [said in mistake.rule for mistake in found] == [True]


def test_the_preset_says_what_the_defaults_are():
    preset = yaml.safe_load((ROOT / "configs/cluster/tpu_vm.yaml").read_text())
    assert preset == {**vars(TpuVmCluster()), "code": "archive"}


def test_the_door(tmp_path):
    """What it renders is what the modules do; a mistake ends it with 78."""
    keys = ("cluster.target=v6e-8", "cluster.zone=us-a", "cluster.code=shared")
    keys += ("run.dir=/runs/a", "cluster.environment.SAID=hello", "action=render")
    command = [sys.executable, "-m", "launch", "cluster=tpu_vm", *keys, "data=text"]
    how = {"cwd": tmp_path, "capture_output": True, "text": True}
    how["env"] = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "data.path=a b"], **how)
    assert done.returncode == 0, done.stderr
    assert "-P -m train data=text 'data.path=a b'" in done.stdout
    assert "export SAID=hello" in done.stdout
    assert "--accelerator-type=v6e-8" in done.stdout.splitlines()[-1]
    wrong = subprocess.run([*command, "cluster.target=tpu7x-128"], **how)
    assert wrong.returncode == 78
    assert "GKE only: cluster=gke_tpu" in wrong.stderr


def test_no_mistakes():
    assert not tpu_vm.mistakes(FULL, "gs://bucket/runs/a")
    assert tpu_vm.machine(FULL).target == "v6e-256x2"


def test_without_gcloud(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Exit, match="gcloud is not installed"):
        gcloud.call(["gcloud"])


SDK = Path("lib/google-cloud-sdk/data/cli/gcloud_completions.py")


def test_flags_are_those_of_the_sdk():
    """The table of the fake against the parser of a real SDK."""
    found = [root / SDK for root in (Path("/usr"), Path("/"), Path.home())]
    there = [file for file in found if file.exists()]
    if not there:
        pytest.skip("needs the Google Cloud SDK (google-cloud-cli)")
    tree: dict = {}
    exec(there[0].read_text(), tree)
    node = tree["STATIC_COMPLETION_CLI_TREE"]
    for word in ("compute", "tpus", "queued-resources"):
        node = node["commands"][word]
    for verb, flags in fake_gcloud.FLAGS.items():
        known = node["commands"][verb]["flags"]
        for flag, takes_value in flags.items():
            assert flag in known, f"{verb} {flag}"
            assert (known[flag] != "bool") == takes_value, f"{verb} {flag}"


def test_the_fake_refuses_what_gcloud_does(stage):
    at = stage([["ACTIVE"]])
    cluster = replace(CLUSTER, options=["--preemptible"])
    with pytest.raises(Exit, match="unrecognized arguments: --preemptible"):
        at.submit(cluster)
