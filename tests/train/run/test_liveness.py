import dataclasses
import os
import sys

import pytest

import train.run.liveness
from train.run.liveness import Owner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def test_a_process_knows_itself_and_its_token_is_its_own():
    me, again = Owner.this_process(), Owner.this_process()
    assert me.alive()
    assert me.pid == os.getpid()
    assert dataclasses.replace(me, token=again.token, since=again.since) == again
    assert me.token != again.token


def test_what_is_written_is_read():
    me = Owner.this_process()
    assert Owner.from_json(me.to_json()) == me


@pytest.mark.parametrize("content", [b"", b'{"token": "a', b"[]", b"{}", b"\xff\0"])
def test_of_the_owner_in_a_damaged_lease_nothing_is_known(content):
    owner = Owner.from_json(content)
    assert owner.alive() is None
    assert "damaged" in str(owner)


def test_the_start_tells_processes_of_one_number_apart():
    me = Owner.this_process()
    assert me.start
    assert dataclasses.replace(me, start=me.start - 1).alive() is False


@pytest.mark.parametrize("pid", [2**22 + 1, os.getpid()], ids=["none", "this"])
def test_of_another_machine_nothing_is_known(pid):
    me = Owner.this_process()
    assert dataclasses.replace(me, machine="elsewhere", pid=pid).alive() is None
    assert dataclasses.replace(me, machine=None, pid=pid).alive() is None


def test_another_users_process_lives_though_it_may_be_hidden(monkeypatch):
    def kill(*_: object) -> None:
        raise PermissionError

    me = Owner.this_process()
    monkeypatch.setattr(os, "kill", kill)
    assert me.alive()
    monkeypatch.setattr(train.run.liveness, "_state_and_start", lambda _: (None, None))
    assert me.alive() is None


def test_without_proc_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(train.run.liveness, "_PROC", tmp_path)
    me = Owner.this_process()
    assert (me.machine, me.start, me.alive()) == (None, None, None)
