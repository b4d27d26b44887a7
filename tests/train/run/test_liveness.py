import dataclasses
import os
import subprocess
import sys

import pytest

import train.run.liveness
from train.run.liveness import Owner, Process, state_and_start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def test_a_process_knows_itself_and_its_token_is_its_own():
    me = Owner.current()
    again = Owner.current()
    assert me.alive()
    assert me.pid == os.getpid()
    assert dataclasses.replace(me, token=again.token, since=again.since) == again
    assert me.token != again.token


@pytest.mark.parametrize("content", [b"", b'{"token": "a', b"[]", b"{}", b"\xff\0"])
def test_of_the_owner_in_a_damaged_lease_nothing_is_known(content):
    owner = Owner.from_json(content)
    assert owner.alive() is None
    assert "damaged" in str(owner)


def test_the_start_tells_processes_of_one_number_apart():
    me = Owner.current()
    assert me.start
    assert dataclasses.replace(me, start=me.start - 1).alive() is False


@pytest.mark.parametrize("pid", [2**22 + 1, os.getpid()], ids=["none", "this"])
def test_of_another_machine_nothing_is_known(pid):
    me = Owner.current()
    assert dataclasses.replace(me, machine="elsewhere", pid=pid).alive() is None
    assert dataclasses.replace(me, machine=None, pid=pid).alive() is None


def test_another_users_process_lives_though_it_may_be_hidden(monkeypatch):
    def kill(*_: object) -> None:
        raise PermissionError

    me = Owner.current()
    monkeypatch.setattr(os, "kill", kill)
    assert me.alive()
    monkeypatch.setattr(train.run.liveness, "state_and_start", lambda _: (None, None))
    assert me.alive() is None


def test_where_there_is_no_proc_ps_is_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(train.run.liveness, "_PROC", tmp_path / "none")
    me = Process.current()
    assert me.alive()
    assert dataclasses.replace(me, start="Sun Jan  1 00:00:00 2012").alive() is False
    assert dataclasses.replace(me, machine="elsewhere").alive() is None
    with subprocess.Popen(["true"]) as ended:  # a zombie until it is waited for
        while state_and_start(ended.pid)[0] != "Z":
            pass
        start = state_and_start(ended.pid)[1]
        assert dataclasses.replace(me, pid=ended.pid, start=start).alive() is False


def test_a_process_is_read_from_among_other_keys():
    me = Process.current()
    values = {**dataclasses.asdict(me), "folder": "runs/base"}
    assert Process.from_dict(values) == me
    assert Process.from_dict({"pid": 7}) is None
