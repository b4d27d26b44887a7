"""Owners are real processes; one "elsewhere" believes that it is on another machine."""

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import train.run.lease
from data.errors import DataError
from data.token_store.storage import Storage
from train.errors import OWNED, Exit
from train.run.lease import Lease, read_owner, take_lease
from train.run.liveness import Owner

pytestmark = pytest.mark.timeout(90)

NEVER_S = 1e6
CHILD = """
import logging, resource, sys
import train.run.liveness
from train.errors import Exit
from train.run.lease import take_lease

folder, interval_s, timeout_s, machine = sys.argv[1:]
if machine:
    train.run.liveness._machine = lambda: machine
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
lease = None
for command in iter(sys.stdin.readline, ""):
    try:
        match command.strip():
            case "take":
                lease = take_lease(
                    folder, float(interval_s), float(timeout_s),
                    lambda message: print("LOST", message, flush=True),
                )
                print("taken", flush=True)
            case "check":
                lease.check()
            case "close":
                lease.close()
            case "full" | "room" as disk:
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                soft = 0 if disk == "full" else hard
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            case "exit":
                sys.exit()
    except Exit as e:
        print(e, flush=True)
        sys.exit(e.code)
    print("did", command, end="", flush=True)
"""


class Process:
    """A process that does what it is told, one command at a time."""

    def __init__(self, folder: str | Path, *, machine: str, times: tuple[float, float]):
        arguments = [str(folder), *map(str, times), machine]
        self.popen = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self.popen.pid
        self.taken: bool | None = None

    def tell(self, *commands: str) -> None:
        assert self.popen.stdin
        for command in commands:
            self.popen.stdin.write(f"{command}\n")

    def until(self, *texts: str) -> list[str]:
        """Read its lines up to one that holds one of the texts."""
        lines: list[str] = []
        assert self.popen.stdout
        for line in self.popen.stdout:
            lines.append(line)
            if any(text in line for text in texts):
                return lines
        raise AssertionError(f"none of {texts} in {lines}")

    def do(self, command: str) -> list[str]:
        self.tell(command)
        return self.until(f"did {command}")

    def send(self, number: int) -> None:
        """Send a signal that stops it or lets it go on, and see it happen."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            os.waitpid(self.pid, os.WUNTRACED)


@pytest.fixture
def start() -> Iterator:
    """Start a process and tell it what to do."""
    with contextlib.ExitStack() as stack:

        def start(folder, *commands, machine="", times=(0.05, NEVER_S)) -> Process:
            process = Process(folder, machine=machine, times=times)
            stack.callback(process.popen.wait)
            stack.callback(process.popen.kill)
            process.tell(*commands)
            return process

        yield start


@pytest.fixture
def take() -> Iterator:
    """Take a lease for this process; its attribute `lost` lists what it heard."""
    with contextlib.ExitStack() as stack:

        def take(folder, times=(0.05, NEVER_S)) -> Lease:
            lost: list[str] = []
            lease = take_lease(str(folder), *times, lost.append)
            stack.callback(lease.close)
            lease.lost = lost  # pyright: ignore
            return lease

        yield take


@pytest.fixture(params=["local", "s3"])
def folder(request, tmp_path) -> str:
    if request.param == "local":
        return str(tmp_path / "run")
    request.getfixturevalue("server")
    return f"s3://bucket/{tmp_path.name}/run"


@pytest.fixture
def run(tmp_path) -> Path:
    return tmp_path / "run"


def refused(take, folder) -> str:
    with pytest.raises(Exit) as caught:
        take(folder)
    assert caught.value.code == OWNED
    return str(caught.value)


def wait_for(true) -> None:
    while not true():
        time.sleep(0.02)


def forge(run: Path, **changed) -> Owner:
    """Write a lease of this process, but for what is changed."""
    owner = dataclasses.replace(Owner.current(), **changed)
    run.mkdir(exist_ok=True)
    (run / "lease.json").write_bytes(owner.to_json())
    return owner


def files(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_a_live_owner_is_named(start, take, folder):
    owner = start(folder, "take")
    owner.until("taken")
    message = refused(take, folder)
    for part in (folder, str(owner.pid), socket.gethostname(), "run.name"):
        assert part in message
    found = read_owner(folder)
    assert found.since in message
    assert found.pid == owner.pid
    assert found.alive()
    wait_for(lambda: read_owner(folder).beat > found.beat)
    owner.do("close")
    assert read_owner(folder) is None
    take(folder)
    assert read_owner(folder).pid == os.getpid()


def test_this_process_owns_a_folder_once(take, run, monkeypatch):
    monkeypatch.chdir(run.parent)
    for here, there in (("run", run), ("memory://run", "memory://run/")):
        with contextlib.closing(take(here)):
            refused(take, there)
        take(there).close()
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


def test_a_later_process_of_the_same_number_is_another(take, run):
    now = Owner.current().start
    assert forge(run).alive()
    refused(take, run)
    assert forge(run, start=now - 1).alive() is False
    take(run)


def test_a_stopped_owner_is_alive(start, take, run):
    owner = start(run, "take")
    owner.until("taken")
    owner.send(signal.SIGSTOP)
    assert str(owner.pid) in refused(take, run)
    owner.send(signal.SIGCONT)
    owner.do("check")


def test_a_leftover_of_a_killed_write_is_in_nobodys_way(take, run):
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
    began = time.monotonic()
    take(run, times=(0.05, 0.5))
    assert time.monotonic() - began >= 0.5
    waiting, taken = (record.getMessage() for record in caplog.records)
    assert "waiting up to 0.5 s" in waiting
    assert "no sign of life for 0.5 s" in taken
    assert all(f"on host far since {since}" in line for line in (waiting, taken))


def test_an_owner_that_beats_elsewhere_is_alive(start, take, folder):
    owner = start(folder, "take", machine="elsewhere")
    owner.until("taken")
    assert read_owner(folder).alive() is None
    assert str(owner.pid) in refused(take, folder)


@pytest.mark.parametrize("closed", [False, True])
def test_an_owner_that_was_replaced_leaves_the_new_lease_alone(
    start, take, folder, closed
):
    owner = start(folder, "take", machine="elsewhere")
    owner.until("taken")
    owner.send(signal.SIGSTOP)
    mine = take(folder, times=(0.05, 2))
    if closed:
        mine.close()
    owner.send(signal.SIGCONT)
    assert folder in owner.until("LOST")[-1]
    owner.do("close")
    owner.tell("check")
    said = owner.popen.stdout.read()
    assert "LOST" not in said
    assert "lease" in said
    assert owner.popen.wait() == OWNED
    if not closed:
        assert read_owner(folder).pid == os.getpid()
        mine.check()
        assert not mine.lost


def test_a_save_is_checked_without_waiting_for_the_beat(take, run):
    mine = take(run, times=(NEVER_S, 0.2))
    mine.check()
    other = forge(run, host="far")
    time.sleep(0.11)
    for _ in range(2):
        with pytest.raises(Exit, match="taken over by process") as caught:
            mine.check()
        assert caught.value.code == OWNED
    assert mine.lost == [str(caught.value)]
    assert read_owner(str(run)) == other


@pytest.mark.parametrize(
    ("folder", "before", "machines"),
    [("local", "nobody", "one"), ("s3", "a dead owner", "eight")],
    indirect=["folder"],
)
def test_of_eight_at_once_one_is_the_owner(start, folder, before, machines):
    dead = dataclasses.replace(Owner.current(), machine="elsewhere")
    if before != "nobody":
        Storage(folder).write("lease.json", dead.to_json())
    names = [""] * 8 if machines == "one" else list("abcdefgh")
    processes = [start(folder, machine=name, times=(0.05, 1)) for name in names]
    for process in processes:
        process.do("wait")  # its imports are done
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


def test_a_damaged_lease_is_watched(take, run, caplog):
    run.mkdir()
    (run / "lease.json").write_bytes(b'{"token": "a')
    assert read_owner(str(run)).alive() is None
    began = time.monotonic()
    take(run, times=(0.05, 0.3))
    assert time.monotonic() - began >= 0.3
    assert "damaged lease" in caplog.text


def test_a_full_disk_ends_nothing(start, run):
    owner = start(run, "take")
    owner.until("taken")
    owner.do("full")
    lines = owner.until("training goes on")
    time.sleep(0.5)
    beat = read_owner(str(run)).beat
    lines = owner.do("check") + owner.do("room")
    assert not [line for line in lines if "training goes on" in line]
    owner.until("is written again")
    wait_for(lambda: read_owner(str(run)).beat > beat + 1)
    assert "LOST" not in "".join(owner.do("close"))
    assert files(run) == []


def test_a_server_that_goes_away_ends_nothing(server, take, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(train.run.lease, "_ANSWER_S", 0.5)
    mine = take("s3://bucket/away/run")
    server.leave()
    wait_for(lambda: "no answer in time" in caplog.text)
    time.sleep(1)
    server.come_back()
    wait_for(lambda: "is written again" in caplog.text)
    assert caplog.text.count("training goes on") == 1
    mine.check()
    assert not mine.lost


@pytest.mark.parametrize("answer", ["error", "refusal"])
def test_a_write_may_succeed_and_seem_to_fail(take, run, monkeypatch, answer):
    real, calls = Storage.replace, []

    def replace(self, *args):
        calls.append(args)
        made = real(self, *args)
        if len(calls) % 2:
            return made
        if answer == "error":
            raise DataError("the connection was lost")
        return None

    monkeypatch.setattr(Storage, "replace", replace)
    mine = take(run, times=(0.02, NEVER_S))
    wait_for(lambda: len(calls) > 8)
    mine.check()
    assert not mine.lost
    monkeypatch.undo()
    mine.close()
    assert files(run) == []


def test_taking_may_succeed_and_seem_to_fail(take, run, monkeypatch):
    real = Storage.replace
    monkeypatch.setattr(Storage, "replace", lambda *args: real(*args) and None)
    mine = take(run, times=(NEVER_S, NEVER_S))
    monkeypatch.undo()
    mine.check()


def test_a_hanging_store_does_not_keep_a_process(start, run):
    owner = start(run, "take")
    owner.until("taken")
    lock = run / "lease.json.__lock"
    while True:  # until it is the file that the next beat waits for
        with lock.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            if lock.exists() and lock.stat().st_ino == os.fstat(file.fileno()).st_ino:
                time.sleep(0.3)
                owner.tell("exit")
                assert owner.popen.wait() == 0
                return


def test_a_store_that_cannot_be_written_is_named(take, run):
    run.write_text("a file")
    with pytest.raises(Exit, match=str(run)) as caught:
        take(run)
    assert caught.value.code == 1


def test_nothing_stays_behind(take, run):
    before = threading.active_count()
    with contextlib.closing(take(run)) as mine:
        assert json.loads((run / "lease.json").read_text())["pid"] == os.getpid()
    mine.close()
    wait_for(lambda: threading.active_count() == before)
    assert files(run) == []
