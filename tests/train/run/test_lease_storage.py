"""A lease survives full disks, and stores that fail, hang or are unreachable."""

import fcntl
import os
import time

import pytest

from data.key_value_store import KeyValueStore
from data.storage import StorageError
from tests.train.run.owners import NEVER_S, files, wait_for
from train.errors import CRASHED, ConfigError, Exit
from train.run import lease as lease_module
from train.run.lease import read_owner

pytestmark = pytest.mark.timeout(90)


def test_a_full_disk_does_not_end_a_run(start, run):
    owner = start(run, "take")
    owner.until("taken")
    owner.do("full")
    lines = owner.until("training continues")
    time.sleep(0.5)
    beat = read_owner(str(run)).beat
    lines = owner.do("check") + owner.do("room")
    assert not [line for line in lines if "training continues" in line]
    owner.until("is written again")
    wait_for(lambda: read_owner(str(run)).beat > beat + 1)
    assert "LOST" not in "".join(owner.do("close"))
    assert files(run) == []


def test_a_server_that_goes_away_does_not_end_a_run(server, take, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(lease_module, "ANSWER_S", 0.5)
    lease = take("s3://bucket/away/run")
    server.leave()
    wait_for(lambda: "no answer in time" in caplog.text)
    time.sleep(1)
    server.come_back()
    wait_for(lambda: "is written again" in caplog.text)
    assert caplog.text.count("training continues") == 1
    lease.check()
    assert not lease.lost


@pytest.mark.parametrize("answer", ["error", "refusal"])
def test_a_write_may_succeed_and_seem_to_fail(take, run, monkeypatch, answer):
    real_replace = KeyValueStore.replace
    calls = []

    def replace(self, *args):
        calls.append(args)
        result = real_replace(self, *args)
        if len(calls) % 2:
            return result
        if answer == "error":
            raise StorageError("s3://bucket", OSError("connection lost"), "written")
        return None

    monkeypatch.setattr(KeyValueStore, "replace", replace)
    lease = take(run, times=(0.02, NEVER_S))
    wait_for(lambda: len(calls) > 8)
    lease.check()
    assert not lease.lost
    monkeypatch.undo()
    lease.close()
    assert files(run) == []


def test_taking_a_lease_may_succeed_and_seem_to_fail(take, run, monkeypatch):
    real_replace = KeyValueStore.replace
    monkeypatch.setattr(
        KeyValueStore, "replace", lambda *args: real_replace(*args) and None
    )
    lease = take(run, times=(NEVER_S, NEVER_S))
    monkeypatch.undo()
    lease.check()


def test_a_hanging_store_does_not_keep_a_process_from_exiting(start, run):
    owner = start(run, "take")
    owner.until("taken")
    lock = run / "lease.json.__lock"
    while True:  # until the next beat waits for the locked file
        with lock.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            if lock.exists() and lock.stat().st_ino == os.fstat(file.fileno()).st_ino:
                time.sleep(0.3)
                owner.tell("exit")
                assert owner.popen.wait() == 0
                return


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("file/run", "Not a directory"),
        ("/proc/nowhere", "No such file or directory"),
    ],
)
def test_a_folder_that_cannot_be_written_is_a_wrong_config_in_words(
    take, tmp_path, folder, reason
):
    (tmp_path / "file").touch()
    run = tmp_path / folder
    with pytest.raises(ConfigError) as error:
        take(run)
    message = str(error.value)
    assert f"run.dir = {run}" in message
    assert f"cannot be read or written: {reason}. Name a folder" in message


def test_a_store_that_does_not_answer_leads_to_another_start(take, run, monkeypatch):
    def silent(*_):
        raise StorageError("s3://bucket", TimeoutError(), "read")

    monkeypatch.setattr(KeyValueStore, "read_version", silent)
    with pytest.raises(Exit, match="no answer in time") as error:
        take(run)
    assert error.value.code == CRASHED
