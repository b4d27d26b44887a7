import dataclasses
import os
import subprocess
import sys

import pytest

from train import liveness
from train.liveness import Owner, Process, state_and_start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def test_a_process_recognises_itself_and_each_owner_has_its_own_token():
    owner = Owner.current()
    second_owner = Owner.current()
    assert owner.alive()
    assert owner.pid == os.getpid()
    assert (
        dataclasses.replace(owner, token=second_owner.token, since=second_owner.since)
        == second_owner
    )
    assert owner.token != second_owner.token


@pytest.mark.parametrize("content", [b"", b'{"token": "a', b"[]", b"{}", b"\xff\0"])
def test_the_owner_in_a_damaged_lease_is_unknown(content):
    owner = Owner.from_json(content)
    assert owner.alive() is None
    assert "damaged" in str(owner)


def test_the_start_time_distinguishes_processes_with_the_same_pid():
    owner = Owner.current()
    assert owner.start
    assert dataclasses.replace(owner, start=owner.start - 1).alive() is False


@pytest.mark.parametrize("pid", [2**22 + 1, os.getpid()], ids=["none", "this"])
def test_the_state_of_a_process_on_another_machine_is_unknown(pid):
    owner = Owner.current()
    assert dataclasses.replace(owner, machine="elsewhere", pid=pid).alive() is None
    assert dataclasses.replace(owner, machine=None, pid=pid).alive() is None


def test_another_users_process_lives_though_it_may_be_hidden(monkeypatch):
    def kill(*_: object) -> None:
        raise PermissionError

    owner = Owner.current()
    monkeypatch.setattr(os, "kill", kill)
    assert owner.alive()
    monkeypatch.setattr(liveness, "state_and_start", lambda _: (None, None))
    assert owner.alive() is None


def test_ps_is_asked_if_there_is_no_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(liveness, "_PROC", tmp_path / "none")
    process = Process.current()
    assert process.alive()
    assert (
        dataclasses.replace(process, start="Sun Jan  1 00:00:00 2012").alive() is False
    )
    assert dataclasses.replace(process, machine="elsewhere").alive() is None
    with subprocess.Popen(["true"]) as child:  # a zombie until it is waited for
        while state_and_start(child.pid)[0] != "Z":
            pass
        start = state_and_start(child.pid)[1]
        assert dataclasses.replace(process, pid=child.pid, start=start).alive() is False


def test_a_process_is_read_from_a_record_with_other_keys():
    process = Process.current()
    values = {**dataclasses.asdict(process), "folder": "runs/base"}
    assert Process.from_dict(values) == process
    assert Process.from_dict({"pid": 7}) is None
