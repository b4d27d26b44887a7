"""`cluster=tpu_vm` with a gcloud that simulates the service (fake_gcloud.py)."""

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
from tests.program import module_option
from train.errors import Exit

STAGES = (TpuStage,)
SLICES = replace(TPU, target="v4-16x2", spot=True)  # two slices of two VMs
WAITS = ["WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]


def states(run: TpuStage) -> list[str]:
    return [*queued.describe_states(run.folder / tpu_vm.STATES)]


@pytest.mark.parametrize(
    ("plan", "made"),
    [
        ([WAITS], 1),
        ([["CREATING", "SUSPENDED"], ["ACTIVE"]], 2),
        ([["FAILED 13 an internal error"], ["FAILED 14 busy"], ["ACTIVE"]], 3),
        ([["!UNAVAILABLE: try again"], ["!INTERNAL: oh"], ["ACTIVE"]], 3),
    ],
)
def test_machines_are_requested_until_they_come(stage, plan, made):
    run = stage(0, plan=plan)
    assert run.submit(TPU) == 0
    assert run.codes == [[0]]
    assert run.verbs().count("create") == made
    assert not run.left


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
def test_it_gives_up_if_no_machines_can_come(stage, plan, code, why):
    run = stage(plan=[plan])
    with pytest.raises(Exit, match=re.escape(why)) as raised:
        run.submit(replace(TPU, valid_until="6h"))
    assert raised.value.code == code
    assert not run.left
    assert "given up" in states(run)[-1]
    assert why in states(run)[-1]
    assert "ssh" not in run.verbs()
    assert "--valid-until-duration=6h" in run.calls()[1]


def test_preempted_machines_are_requested_again(stage):
    run = stage("run", 0, plan=[["ACTIVE"], WAITS])
    name = run.job.name
    run.later(
        lambda: run.starts() == [1] * 4,
        lambda: fake_gcloud.preempt(run.fake, name),
    )
    assert run.submit(replace(SLICES, max_restarts=0)) == 0
    assert run.codes == [[None] * 4, [0] * 4]
    assert run.verbs().count("create") == 2
    assert not run.left
    history = "\n".join(states(run))
    assert re.search(r"ACTIVE\n.*SUSPEND.*\n(.*\n)*.*WAITING_FOR_RESOURCES", history)


def test_the_output_of_a_crash_is_shown(stage, caplog):
    run = stage(1, 0)
    run.submit(SLICES)
    for vm in ("0-w-0", "0-w-1", "1-w-0", "1-w-1"):
        assert f"{run.job.name}-{vm}:0: start 1" in caplog.text
    assert run.verbs().count("create") == 1  # the same machines served again
    assert not run.left


def test_machines_can_be_kept(stage):
    run = stage(0)
    assert run.submit(replace(TPU, keep=True)) == 0
    assert run.left == [run.job.name]


def test_ctrl_c_while_it_waits_for_machines(stage):
    run = stage(plan=[["WAITING_FOR_RESOURCES"]])
    run.later(lambda: run.verbs().count("describe") > 2, interrupt)
    assert run.submit() == 130
    assert not run.left


def test_stopped_from_another_machine_while_it_waits_for_machines(stage, monkeypatch):
    run = stage(0, plan=[["WAITING_FOR_RESOURCES"], ["ACTIVE"]])

    def stop() -> None:
        # The other machine sees no supervisor.
        monkeypatch.setattr(supervise, "alive", lambda _: False)
        assert tpu_vm.stop(newest_submission(run.job.run_dir)) == 0

    stopping = run.later(lambda: run.verbs().count("describe") > 2, stop)
    code = run.submit()
    stopping.join()  # otherwise it could reach into the next test
    assert code == 130
    assert run.verbs().count("create") == 1
    assert not run.left


def test_ctrl_c_leaves_no_machines_when_they_are_being_deleted(stage, monkeypatch):
    run = stage(0)
    delete = queued.QueuedResource.delete

    def interrupt_then_delete(resource: queued.QueuedResource) -> bool:
        interrupt()
        return delete(resource)

    monkeypatch.setattr(queued.QueuedResource, "delete", interrupt_then_delete)
    assert run.submit() == 0
    assert not run.left


def test_machines_that_stay_silent_are_replaced(stage, monkeypatch):
    monkeypatch.setattr(attempt, "LOST_S", 0.5)
    run = stage("run", 0)

    def break_for_long() -> None:
        offline = run.cut_off()
        until((run.folder / "attempts.jsonl").exists)
        offline.unlink()

    def first_output_arrived() -> bool:
        file = run.folder / supervise.LOG
        return file.exists() and "start 1" in file.read_text()

    run.later(first_output_arrived, break_for_long)
    assert run.submit(TPU) == 0
    # A slow machine may need more attempts in between.
    assert (run.codes[0], run.codes[-1]) == ([None], [0])


def test_status_says_why_it_waits(stage):
    run = stage(plan=[["WAITING_FOR_RESOURCES"]])
    submission = run.kept()
    assert "queued resource: none: it is over" in tpu_vm.status(submission)[0]
    subprocess.run(
        gcloud.resource_commands(run.job.name, run.cluster)["create"], check=True
    )
    assert tpu_vm.status(submission)[0] == "queued resource: WAITING_FOR_RESOURCES"


def test_the_archive_is_copied_to_every_vm(stage):
    run = stage()
    cluster = replace(SLICES, code=Code.archive)
    submission = run.kept(cluster, {ARCHIVE: "archive", UNPACK: "unpack"})
    argument_printer(run.fake / "bin", "trainer")
    assert supervise.submitted_hosts(submission).begin(Wait(), watch_running=False)
    until((run.fake / "bin/arguments.jsonl").exists)
    train = ["trainer", "-P", *module_option("train")]
    expected = ["./unpack.py", "./code.tar.gz", "--", *train]
    assert printed(run.fake / "bin")[0] == expected
    for vm in ("0-w-0", "1-w-1"):
        home = run.fake / f"vm/{run.job.name}-{vm}/longhaul/{run.job.name}"
        assert (home / ARCHIVE).read_text() == "archive"


SDK = Path("lib/google-cloud-sdk/data/cli/gcloud_completions.py")


def test_the_sdk_knows_the_flags():
    folders = [root / SDK for root in (Path("/usr"), Path("/"), Path.home())]
    files = [file for file in folders if file.exists()]
    if not files:
        pytest.skip("needs the Google Cloud SDK (google-cloud-cli)")
    tree: dict = {}
    exec(files[0].read_text(), tree)
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
            flags = node["commands"][verb]["flags"]
            flags = {**flags, "--project": "", "--format": "", "--quiet": "bool"}
            assert (flags[flag] != "bool") == bool(equals), f"{verb} {flag}"
