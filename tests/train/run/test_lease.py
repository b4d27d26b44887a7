"""Owners are real processes. Machine "elsewhere" stands for another machine."""

import contextlib
import dataclasses
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from data.key_value_store import KeyValueStore
from tests.train.run.owners import NEVER_S, files, wait_for
from train.errors import OWNED, Exit
from train.liveness import Owner
from train.run.lease import read_owner

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(params=["local", "s3"])
def folder(request, tmp_path) -> str:
    if request.param == "local":
        return str(tmp_path / "run")
    request.getfixturevalue("server")
    return f"s3://bucket/{tmp_path.name}/run"


def refusal(take, folder) -> str:
    with pytest.raises(Exit) as error:
        take(folder)
    assert error.value.code == OWNED
    return str(error.value)


def forge(run: Path, **changes) -> Owner:
    """Write a lease of this process with some fields changed, and return its owner."""
    owner = dataclasses.replace(Owner.current(), **changes)
    run.mkdir(exist_ok=True)
    (run / "lease.json").write_bytes(owner.to_json())
    return owner


def test_a_live_owner_is_named(start, take, folder):
    owner = start(folder, "take")
    owner.until("taken")
    message = refusal(take, folder)
    for part in (folder, str(owner.pid), socket.gethostname(), "run.name"):
        assert part in message
    lease_owner = read_owner(folder)
    assert lease_owner.since in message
    assert lease_owner.pid == owner.pid
    assert lease_owner.alive()
    wait_for(lambda: read_owner(folder).beat > lease_owner.beat)
    owner.do("close")
    assert read_owner(folder) is None
    take(folder)
    assert read_owner(folder).pid == os.getpid()


def test_this_process_owns_a_folder_once(take, run, monkeypatch):
    monkeypatch.chdir(run.parent)
    for path, alias in (("run", run), ("memory://run", "memory://run/")):
        with contextlib.closing(take(path)):
            refusal(take, alias)
        take(alias).close()
    assert files(run) == []


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_owner_is_followed_at_once(start, take, run, reaped, caplog):
    owner = start(run, "take")
    owner.until("taken")
    owner.popen.kill()
    if reaped:
        owner.popen.wait()
    else:
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
    assert read_owner(str(run)).alive() is False
    take(run)
    assert read_owner(str(run)).pid == os.getpid()
    assert f"taken over from process {owner.pid}" in caplog.text


def test_a_leftover_of_a_killed_write_blocks_no_start(take, run):
    forge(run, pid=2**22 + 1)
    (run / "lease.json.__lock").write_bytes(b"torn")
    take(run, times=(NEVER_S, NEVER_S))
    assert files(run) == ["lease.json"]


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_silent_owner_elsewhere_is_followed_in_time(take, run, hours, caplog):
    caplog.set_level("INFO")
    since = time.strftime("%FT%T+00:00", time.gmtime(time.time() + hours * 3600))
    forge(run, machine="elsewhere", host="far", since=since)
    os.utime(run / "lease.json", (time.time() + hours * 3600,) * 2)
    start_time = time.monotonic()
    take(run, times=(0.05, 0.5))
    assert time.monotonic() - start_time >= 0.5
    waiting_message, takeover_message = (
        record.getMessage() for record in caplog.records
    )
    assert "waiting up to 0.5 s" in waiting_message
    assert "no sign of life for 0.5 s" in takeover_message
    assert all(
        f"on host far since {since}" in line
        for line in (waiting_message, takeover_message)
    )


def test_an_owner_that_beats_elsewhere_is_alive(start, take, folder):
    owner = start(folder, "take", machine="elsewhere")
    owner.until("taken")
    assert read_owner(folder).alive() is None
    assert str(owner.pid) in refusal(take, folder)


@pytest.mark.parametrize("closed", [False, True])
def test_an_owner_that_was_replaced_leaves_the_new_lease_alone(
    start, take, folder, closed
):
    owner = start(folder, "take", machine="elsewhere")
    owner.until("taken")
    owner.send(signal.SIGSTOP)
    lease = take(folder, times=(0.05, 2))
    if closed:
        lease.close()
    owner.send(signal.SIGCONT)
    assert folder in owner.until("LOST")[-1]
    owner.do("close")
    owner.tell("check")
    output = owner.popen.stdout.read()
    assert "LOST" not in output
    assert "lease" in output
    assert owner.popen.wait() == OWNED
    if not closed:
        assert read_owner(folder).pid == os.getpid()
        lease.check()
        assert not lease.lost


def test_a_save_is_checked_without_waiting_for_the_beat(take, run):
    lease = take(run, times=(NEVER_S, 0.2))
    lease.check()
    new_owner = forge(run, host="far")
    time.sleep(0.11)
    for _ in range(2):
        with pytest.raises(Exit, match="taken over by process") as error:
            lease.check()
        assert error.value.code == OWNED
    assert lease.lost == [str(error.value)]
    assert read_owner(str(run)) == new_owner


@pytest.mark.parametrize(
    ("folder", "before", "machines"),
    [("local", "nobody", "one"), ("s3", "a dead owner", "eight")],
    indirect=["folder"],
)
def test_one_of_eight_simultaneous_starts_becomes_the_owner(
    start, folder, before, machines
):
    dead_owner = dataclasses.replace(Owner.current(), machine="elsewhere")
    if before != "nobody":
        KeyValueStore(folder).write("lease.json", dead_owner.to_json())
    names = [""] * 8 if machines == "one" else list("abcdefgh")
    # Eight processes that read every 0.05 s would keep a slow machine's server busy.
    processes = [start(folder, machine=name, times=(0.5, 2)) for name in names]
    for process in processes:
        process.do("wait")  # until its imports are done
    for process in processes:
        process.tell("take")
    for process in processes:
        process.taken = "owned by" not in process.until("taken\n", "owned by")[-1]
    (owner,) = [process for process in processes if process.taken]
    assert read_owner(folder).pid == owner.pid
    owner.do("check")
    for process in processes:
        if process is not owner:
            assert process.popen.wait() == OWNED
