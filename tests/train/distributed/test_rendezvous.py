"""The roll of processes: who is missing, who leaves, who is none of ours."""

import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.fleet import REPOSITORY, free_port
from train.distributed import rendezvous
from train.distributed.rendezvous import await_processes, join_processes
from train.errors import ABORTED, WRONG_CONFIG, Exit

PATIENCE_S = 60


@pytest.fixture
def address() -> str:
    return f"localhost:{free_port()}"


@pytest.fixture
def start():
    """Run in a thread, with a limit far beyond what the test waits for."""
    threads = ThreadPoolExecutor(16)
    yield lambda what, *args: threads.submit(what, *args, float(PATIENCE_S))
    threads.shutdown(wait=False)


def connect(address: str) -> socket.socket:
    """Connect as soon as somebody listens."""
    host, _, port = address.partition(":")
    while True:
        try:
            return socket.create_connection((host, int(port)), PATIENCE_S)
        except ConnectionRefusedError:
            threading.Event().wait(0.02)


def hello(process: int, processes: int) -> bytes:
    said = {"process": process, "processes": processes}
    return json.dumps(said).encode() + b"\n"


def heard(address: str, process: int, processes: int) -> socket.socket:
    """Arrive, as a process does."""
    connection = connect(address)
    connection.sendall(hello(process, processes))
    said = b'{"heard": true}\n'
    assert connection.recv(len(said), socket.MSG_WAITALL) == said
    return connection


def verdict(connection: socket.socket) -> dict:
    return json.loads(connection.makefile().readline())


def ends(*futures: Future) -> list[tuple[int, str]]:
    found = []
    for future in futures:
        with pytest.raises(Exit) as error:
            future.result(PATIENCE_S / 2)
        found.append((error.value.code, str(error.value)))
    return found


def test_all_go_on_when_all_are_there(start, address):
    others = [start(join_processes, address, n, 4) for n in (1, 3)]
    first = start(await_processes, address, 4)
    others.append(start(join_processes, address, 2, 4))
    for process in (first, *others):
        process.result(PATIENCE_S)


def test_one_that_was_heard_and_leaves_ends_all_at_once(start, address):
    first = start(await_processes, address, 4)
    with heard(address, 1, 4) as other:
        heard(address, 2, 4).close()
        ((code, said),) = ends(first)
        assert code == ABORTED
        assert "process 2 on " in said
        assert "left while the others were waited for" in said
        assert verdict(other) == {"code": code, "wrong": said}


def test_the_others_end_at_once_when_process_0_leaves(start, address):
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as server:
        other = start(join_processes, address, 1, 3)
        connection, _ = server.accept()
        connection.sendall(b'{"heard": true}\n')
        connection.close()
    ((code, said),) = ends(other)
    assert code == ABORTED
    assert "process 1: process 0 left" in said


def test_a_coordinator_of_an_earlier_start_is_not_taken_for_process_0(start, address):
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as server:
        other = start(join_processes, address, 1, 2)
        connection, _ = server.accept()
        connection.sendall(b"\x00\x00\x12\x04")  # HTTP/2
        connection.close()
    start(await_processes, address, 2).result(PATIENCE_S)
    other.result(PATIENCE_S)


def test_strangers_hold_nobody_up(start, address):
    first = start(await_processes, address, 2)
    with connect(address), connect(address) as talking, connect(address) as odd:
        talking.sendall(b"GET / HTTP/1.1\r\n\r\n")
        odd.sendall(b"[]\n")
        assert talking.recv(100) == b""  # not spoken with
        start(join_processes, address, 1, 2).result(PATIENCE_S)
        first.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("process", "total", "said"),
    [
        (1, 3, "there is one of that number already, on "),
        (0, 3, "there is one of that number already, on process 0's host"),
        (2, 8, "but there are 3 processes"),
    ],
)
def test_one_that_cannot_be_ends_all(start, address, process, total, said):
    first = start(await_processes, address, 3)
    with heard(address, 1, 3) as other:
        for code, text in ends(first, start(join_processes, address, process, total)):
            assert code == WRONG_CONFIG
            assert said in text
        assert said in verdict(other)["wrong"]


def test_more_processes_than_a_process_may_open_files(address):
    """Where the soft limit is low, as it is on most machines, it is raised."""
    processes = 300
    code = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard));"
        "from train.distributed.rendezvous import await_processes;"
        f"await_processes({address!r}, {processes}, {PATIENCE_S})"
    )
    first = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    others = [connect(address) for _ in range(1, processes)]
    for number, other in enumerate(others, 1):
        other.sendall(hello(number, processes))
    for other in others:
        with other:
            assert other.makefile().read() == '{"heard": true}\n{}\n'
    assert first.wait(PATIENCE_S) == 0


def test_a_port_that_is_taken_is_named(monkeypatch, address):
    monkeypatch.setattr(rendezvous, "_TAKEN_S", 0.0)
    port = int(address.partition(":")[2])
    with (
        socket.create_server(("", port)),
        pytest.raises(Exit, match=f"port {port} of process 0 is taken") as error,
    ):
        await_processes(address, 2, PATIENCE_S)
    assert error.value.code == WRONG_CONFIG


def test_a_second_process_of_a_number_is_told_that_the_run_has_begun(start, address):
    """Where process 0 waited, JAX's coordinator listens by then."""
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as server, ThreadPoolExecutor() as one:
        other = one.submit(join_processes, address, 1, 2, 0)
        connection, _ = server.accept()
        connection.sendall(b"\x00\x00\x12\x04")  # HTTP/2, which waits for its client
        ((code, said),) = ends(other)
        connection.close()
    assert code == WRONG_CONFIG
    assert "another process of this number" in said
