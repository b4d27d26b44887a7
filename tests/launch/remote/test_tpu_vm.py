"""`cluster=tpu_vm` against a gcloud that plays the service (fake_gcloud.py)."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launch.config.clusters import Code
from launch.job import ARCHIVE, UNPACK
from launch.remote import attempt, gcloud, supervise, tpu_vm
from launch.remote import queued_resource as queued
from launch.remote.tpu_hosts import copy_to_vms, ssh_to_vms
from launch.submissions import newest_submission
from launch.supervisor import Wait
from tests.launch import fake_gcloud
from tests.launch.hostile import argument_printer, printed
from tests.launch.kinds import TPU_VM
from tests.launch.remote.stage import TPU, TpuStage, interrupt, until
from train.errors import Exit

STAGES = (TpuStage,)
SLICES = replace(TPU, target="v4-16x2", spot=True)  # two of two VMs
WAITS = ["WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]


def states(at: TpuStage) -> list[str]:
    return [*queued.describe_states(at.folder / tpu_vm.STATES)]


@pytest.mark.parametrize(
    ("plan", "made"),
    [
        ([WAITS], 1),
        ([["CREATING", "SUSPENDED"], ["ACTIVE"]], 2),
        ([["FAILED 13 an internal error"], ["FAILED 14 busy"], ["ACTIVE"]], 3),
        ([["!UNAVAILABLE: try again"], ["!INTERNAL: oh"], ["ACTIVE"]], 3),
    ],
)
def test_machines_come_in_the_end(stage, plan, made):
    at = stage(0, plan=plan)
    assert at.submit(TPU) == 0
    assert at.codes == [[0]]
    assert at.verbs().count("create") == made
    assert not at.left


@pytest.mark.parametrize(
    ("plan", "code", "why"),
    [
        (["FAILED 8 Quota 'TPUV4s' exhausted. Limit 0"], 78, "Quota 'TPUV4s"),
        (["!PERMISSION_DENIED: tpu.googleapis is off"], 78, "googleapis is off"),
        (["!RESOURCE_EXHAUSTED: Quota limit 'X' has been exceeded"], 78, "Quota limit"),
        (["FAILED 8 There is no more capacity"], 1, "no more capacity (5 times)"),
        (["!UNAVAILABLE: nobody there"], 1, "nobody there (5 times)"),
        (["WAITING_FOR_RESOURCES", "FAILED 4 the valid until time"], 1, "valid until"),
    ],
)
def test_it_gives_up_where_that_is_all_one_can_do(stage, plan, code, why):
    at = stage(plan=[plan])
    with pytest.raises(Exit, match=re.escape(why)) as raised:
        at.submit(replace(TPU, valid_until="6h"))
    assert raised.value.code == code
    assert not at.left
    assert "given up" in states(at)[-1]
    assert why in states(at)[-1]
    assert "ssh" not in at.verbs()
    assert "--valid-until-duration=6h" in at.calls()[1]


def test_preempted_machines_are_asked_for_again(stage):
    at = stage("run", 0, plan=[["ACTIVE"], WAITS])
    name = at.job.name
    at.later(lambda: at.starts() == [1] * 4, lambda: fake_gcloud.preempt(at.fake, name))
    assert at.submit(replace(SLICES, max_restarts=0)) == 0
    assert at.codes == [[None] * 4, [0] * 4]
    assert at.verbs().count("create") == 2
    assert not at.left
    seen = "\n".join(states(at))
    assert re.search(r"ACTIVE\n.*SUSPEND.*\n(.*\n)*.*WAITING_FOR_RESOURCES", seen)


def test_what_a_crash_says_is_shown(stage, caplog):
    at = stage(1, 0)
    at.submit(SLICES)
    for vm in ("0-w-0", "0-w-1", "1-w-0", "1-w-1"):
        assert f"{at.job.name}-{vm}:0: start 1" in caplog.text
    assert at.verbs().count("create") == 1  # the machines were there still
    assert not at.left


def test_machines_can_be_kept(stage):
    at = stage(0)
    assert at.submit(replace(TPU, keep=True)) == 0
    assert at.left == [at.job.name]


def test_ctrl_c_while_it_waits_for_machines(stage):
    at = stage(plan=[["WAITING_FOR_RESOURCES"]])
    at.later(lambda: at.verbs().count("describe") > 2, interrupt)
    assert at.submit() == 130
    assert not at.left


def test_stopped_from_another_machine_while_it_waits_for_machines(stage, monkeypatch):
    at = stage(0, plan=[["WAITING_FOR_RESOURCES"], ["ACTIVE"]])

    def stop() -> None:
        monkeypatch.setattr(supervise, "alive", lambda _: False)  # as seen from there
        assert tpu_vm.stop(newest_submission(at.job.run_dir)) == 0

    stopping = at.later(lambda: at.verbs().count("describe") > 2, stop)
    code = at.submit()
    stopping.join()  # else it would go on in the next test
    assert code == 130
    assert at.verbs().count("create") == 1
    assert not at.left


def test_ctrl_c_leaves_no_machines_when_they_are_being_deleted(stage, monkeypatch):
    at = stage(0)
    delete = queued.QueuedResource.delete

    def interrupted(resource: queued.QueuedResource) -> bool:
        interrupt()
        return delete(resource)

    monkeypatch.setattr(queued.QueuedResource, "delete", interrupted)
    assert at.submit() == 0
    assert not at.left


def test_machines_that_stay_silent_are_replaced(stage, monkeypatch):
    monkeypatch.setattr(attempt, "LOST_S", 0.5)
    at = stage("run", 0)

    def break_for_long() -> None:
        offline = at.cut_off()
        until((at.folder / "attempts.jsonl").exists)
        offline.unlink()

    def heard_of() -> bool:
        file = at.folder / supervise.LOG
        return file.exists() and "start 1" in file.read_text()

    at.later(heard_of, break_for_long)
    assert at.submit(TPU) == 0
    assert (at.codes[0], at.codes[-1]) == ([None], [0])  # more on a slow machine


def test_status_says_why_it_waits(stage):
    at = stage(plan=[["WAITING_FOR_RESOURCES"]])
    submission = at.kept()
    assert "queued resource: none: it is over" in tpu_vm.status(submission)[0]
    subprocess.run(
        gcloud.resource_commands(at.job.name, at.cluster)["create"], check=True
    )
    assert tpu_vm.status(submission)[0] == "queued resource: WAITING_FOR_RESOURCES"


def test_the_archive_goes_along(stage):
    at = stage()
    cluster = replace(SLICES, code=Code.archive)
    submission = at.kept(cluster, {ARCHIVE: "archive", UNPACK: "unpack"})
    argument_printer(at.fake / "bin", "trainer")
    assert supervise.submitted_hosts(submission).begin(Wait(), watch_running=False)
    until((at.fake / "bin/arguments.jsonl").exists)
    train = ["trainer", "-P", "-m", "train"]
    wanted = ["./unpack.py", "./code.tar.gz", "--", *train]
    assert printed(at.fake / "bin")[0] == wanted
    for vm in ("0-w-0", "1-w-1"):
        home = at.fake / f"vm/{at.job.name}-{vm}/longhaul/{at.job.name}"
        assert (home / ARCHIVE).read_text() == "archive"


SDK = Path("lib/google-cloud-sdk/data/cli/gcloud_completions.py")


def test_flags_are_those_of_the_sdk():
    folders = [root / SDK for root in (Path("/usr"), Path("/"), Path.home())]
    there = [file for file in folders if file.exists()]
    if not there:
        pytest.skip("needs the Google Cloud SDK (google-cloud-cli)")
    tree: dict = {}
    exec(there[0].read_text(), tree)
    node = tree["STATIC_COMPLETION_CLI_TREE"]
    for word in ("compute", "tpus", "queued-resources"):
        node = node["commands"][word]
    commands = [
        *gcloud.resource_commands("x", TPU_VM).values(),
        copy_to_vms("x", TPU_VM),
    ]
    for command in (*commands, ssh_to_vms("x", TPU_VM, "true")):
        group, verb, *words = command[3:]
        assert group == "queued-resources"
        for flag, equals, _ in (w.partition("=") for w in words if w[:2] == "--"):
            known = node["commands"][verb]["flags"]
            known = {**known, "--project": "", "--format": "", "--quiet": "bool"}
            assert (known[flag] != "bool") == bool(equals), f"{verb} {flag}"
