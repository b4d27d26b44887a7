"""A rendezvous names the processes that are missing, leave or are strangers."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.fleet import REPOSITORY, free_port
from tests.program import program_code
from train.distributed import arrivals, rendezvous
from train.distributed.messages import (
    SECRET_VARIABLE,
    Hello,
    heard_line,
    hello_line,
    job_secret,
)
from train.distributed.rendezvous import await_processes, join_processes
from train.errors import ABORTED, WRONG_CONFIG, Exit

PATIENCE_S = 60


@pytest.fixture
def address() -> str:
    return f"localhost:{free_port()}"


@pytest.fixture
def start():
    """Run a function in a thread; its limit is far beyond the time of the test."""
    threads = ThreadPoolExecutor(16)
    yield lambda function, *args: threads.submit(function, *args, float(PATIENCE_S))
    threads.shutdown(wait=False)


@pytest.fixture
def start_with():
    """Run a function in a thread; the last argument is the secret of the run."""
    threads = ThreadPoolExecutor(16)

    def submit(function, *args, patience_s=PATIENCE_S):
        *arguments, secret = args
        return threads.submit(function, *arguments, float(patience_s), secret)

    yield submit
    threads.shutdown(wait=False)


def connect(address: str) -> socket.socket:
    """Connect as soon as a process listens."""
    host, _, port = address.partition(":")
    while True:
        try:
            return socket.create_connection((host, int(port)), PATIENCE_S)
        except ConnectionRefusedError:
            threading.Event().wait(0.02)


def hello(process: int, processes: int) -> bytes:
    message = {"process": process, "processes": processes}
    return json.dumps(message).encode() + b"\n"


def arrive(address: str, process: int, processes: int) -> socket.socket:
    """Send the hello of a process, and wait for the answer."""
    connection = connect(address)
    connection.sendall(hello(process, processes))
    answer = b'{"heard": true}\n'
    assert connection.recv(len(answer), socket.MSG_WAITALL) == answer
    return connection


def read_verdict(connection: socket.socket) -> dict:
    return json.loads(connection.makefile().readline())


def collect_exits(*futures: Future) -> list[tuple[int, str]]:
    exits = []
    for future in futures:
        with pytest.raises(Exit) as error:
            future.result(PATIENCE_S / 2)
        exits.append((error.value.code, str(error.value)))
    return exits


def test_all_continue_when_all_have_arrived(start, address):
    members = [start(join_processes, address, n, 4) for n in (1, 3)]
    first = start(await_processes, address, 4)
    members.append(start(join_processes, address, 2, 4))
    for process in (first, *members):
        process.result(PATIENCE_S)


def test_a_process_that_arrives_and_leaves_ends_all_at_once(start, address):
    first = start(await_processes, address, 4)
    with arrive(address, 1, 4) as peer:
        arrive(address, 2, 4).close()
        ((code, message),) = collect_exits(first)
        assert code == ABORTED
        assert "process 2 on " in message
        assert "left while the others were waited for" in message
        assert read_verdict(peer) == {"code": code, "wrong": message}


def test_the_others_end_at_once_when_process_0_leaves(start, address):
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as server:
        member = start(join_processes, address, 1, 3)
        connection, _ = server.accept()
        connection.sendall(b'{"heard": true}\n')
        connection.close()
    ((code, message),) = collect_exits(member)
    assert code == ABORTED
    assert "process 1: process 0 left" in message


def test_a_coordinator_of_an_earlier_start_is_not_taken_for_process_0(start, address):
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as server:
        member = start(join_processes, address, 1, 2)
        connection, _ = server.accept()
        connection.sendall(b"\x00\x00\x12\x04")  # HTTP/2
        connection.close()
    start(await_processes, address, 2).result(PATIENCE_S)
    member.result(PATIENCE_S)


def test_strangers_do_not_delay_a_job(start, address):
    first = start(await_processes, address, 2)
    with connect(address), connect(address) as browser, connect(address) as client:
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
        client.sendall(b"[]\n")
        assert browser.recv(100) == b""  # It gets no answer.
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
def test_a_process_that_contradicts_the_others_ends_all(
    start, address, process, total, said
):
    first = start(await_processes, address, 3)
    with arrive(address, 1, 3) as peer:
        for code, text in collect_exits(
            first, start(join_processes, address, process, total)
        ):
            assert code == WRONG_CONFIG
            assert said in text
        assert said in read_verdict(peer)["wrong"]


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_two_processes_with_number_0_end_all(start, address, processes):
    first = start(await_processes, address, processes)
    if processes > 2:
        peer = arrive(address, 1, processes)
    else:
        connect(address).close()  # The first one listens.
    second = start(await_processes, address, processes)
    for code, message in collect_exits(first, second):
        assert code == WRONG_CONFIG, message
        assert f"process 0 of {processes} came from" in message
        assert "its own distributed.process_id" in message
    if processes > 2:
        assert read_verdict(peer)["code"] == WRONG_CONFIG


def test_more_processes_than_a_process_may_open_files(address):
    """The rendezvous raises the soft limit of open files, low on most machines."""
    processes = 300
    code = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard));"
        "from train.distributed.rendezvous import await_processes;"
        f"await_processes({address!r}, {processes}, {PATIENCE_S})"
    )
    first = subprocess.Popen([sys.executable, "-c", program_code(code)], cwd=REPOSITORY)
    connections = [connect(address) for _ in range(1, processes)]
    for number, connection in enumerate(connections, 1):
        connection.sendall(hello(number, processes))
    for connection in connections:
        with connection:
            assert connection.makefile().read() == '{"heard": true}\n{}\n'
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


def test_a_second_process_with_a_number_learns_that_the_run_has_begun(start, address):
    """JAX's coordinator listens by then on the port where process 0 waited."""
    host, _, port = address.partition(":")
    with (
        socket.create_server((host, int(port))) as server,
        ThreadPoolExecutor() as pool,
    ):
        member = pool.submit(join_processes, address, 1, 2, 0)
        connection, _ = server.accept()
        connection.sendall(b"\x00\x00\x12\x04")  # It speaks HTTP/2, and waits.
        ((code, message),) = collect_exits(member)
        connection.close()
    assert code == WRONG_CONFIG
    assert "another process of this number" in message


SIGNED = hello_line(Hello(1, 2), "the secret")
# Strangers send these. None may end the rendezvous, or be accepted by it.
STRANGE = {
    "infinity": b'{"process": Infinity, "processes": 2}\n',
    "minus infinity": b'{"process": 1, "processes": -Infinity}\n',
    "nan": b'{"process": NaN, "processes": NaN}\n',
    "huge": b'{"process": 1' + b"0" * 400 + b', "processes": 2}\n',
    "too large for a float": b'{"process": 1e999, "processes": 2}\n',
    "float": b'{"process": 1.0, "processes": 2}\n',
    "negative": b'{"process": -1, "processes": 2}\n',
    "text": b'{"process": "1", "processes": "2"}\n',
    "boolean": b'{"process": true, "processes": 2}\n',
    "null": b'{"process": null, "processes": 2}\n',
    "list": b'{"process": [1], "processes": 2}\n',
    "empty": b"{}\n",
    "number": b"1\n",
    "nested": b"[" * 1000,
    "nested on a line": b"[" * 500 + b"\n",
    "nested objects": b'{"a":' * 90 + b"\n",
    "deep and long": b"[" * 200_000,
    "long": b'{"process": 1, "processes": 2, "x": "' + b"x" * 100_000 + b'"}\n',
    "no line break": b"x" * 400,
    "binary": bytes(range(256)),
    "nul": b"\0" * 100 + b"\n",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100a5010000a10303") + b"\n",
    "utf-16": '{"process": 1, "processes": 2}\n'.encode("utf-16"),
    "surrogate": b'{"process": 1, "processes": 2, "key": "\\ud800"}\n',
    "unsigned": b'{"process": 1, "processes": 2}\n',
    "unsigned and wrong": b'{"process": 1, "processes": 9}\n',
    "unsigned process 0": b'{"process": 0, "processes": 2}\n',
    "other secret": hello_line(Hello(1, 2), "another"),
    "key of a wrong type": b'{"process": 1, "processes": 2, "key": [1]}\n',
    "two keys": SIGNED.replace(b'"key": "', b'"key": "x", "key": "0'),
    "part of a message": SIGNED[:-20],
}


@pytest.mark.parametrize("sent", STRANGE.values(), ids=STRANGE)
def test_no_message_of_a_stranger_ends_a_job(start_with, address, sent, caplog):
    first = start_with(await_processes, address, 2, "the secret")
    with connect(address) as stranger, connect(address) as half, connect(address):
        with contextlib.suppress(OSError):  # It may be refused before the end.
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            half.sendall(sent[: len(sent) // 2])
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(100) in (b"", b'{"heard": false}\n')
        assert not first.done()
        start_with(join_processes, address, 1, 2, "the secret").result(PATIENCE_S)
        first.result(PATIENCE_S)
    assert "is no process of this run" in caplog.text


def test_many_slow_clients_do_not_delay_a_job(start_with, address, monkeypatch, caplog):
    monkeypatch.setattr(arrivals, "CLIENT_S", 4.0)
    monkeypatch.setattr(arrivals, "MAX_UNKNOWN", 4)
    first = start_with(await_processes, address, 2, "the secret")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in range(20)]
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(SIGNED[:10])
        for client in clients:
            with contextlib.suppress(ConnectionError):
                assert client.recv(100) == b""
        start_with(join_processes, address, 1, 2, "the secret").result(PATIENCE_S)
        first.result(PATIENCE_S)
    assert "too many that say nothing" in caplog.text
    assert len(caplog.records) < 10


ANSWERS = {
    "unsigned": b'{"heard": true}\n{}\n',
    "other secret": heard_line("another") + b"{}\n",
    "a code": b'{"code": 78, "wrong": "stop"}\n',
    "nested": b'{"heard":' * 10_000,
    "nested on a line": b'{"heard":' * 6_000 + b"\n",
    "long": b'{"heard": "' + b"x" * 200_000,
    "infinity": b'{"heard": Infinity}\n',
    "list": b"[true]\n",
    "binary": bytes(range(256)),
    "half a line": b'{"heard": tr',
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_process_trusts_only_its_own_process_0(start_with, address, answer):
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as server:
        member = start_with(join_processes, address, 1, 2, "the secret")
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(answer)
    start_with(await_processes, address, 2, "the secret").result(PATIENCE_S)
    member.result(PATIENCE_S)


@pytest.mark.parametrize(
    "verdict",
    [
        *(b"[]\n", b'{"code": "78", "wrong": ""}\n', b'{"code": Infinity}\n'),
        *(b'{"code": 1e400}\n', b'{"code": 10000}\n', b"[" * 5000 + b"\n", b"{"),
    ],
)
def test_an_unreadable_verdict_ends_with_a_known_code(start_with, address, verdict):
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as server:
        member = start_with(join_processes, address, 1, 2, "the secret")
        connection, _ = server.accept()
        with connection:
            connection.sendall(heard_line("the secret") + verdict)
    ((code, text),) = collect_exits(member)
    assert code == ABORTED
    assert "process 0 left" in text


def test_two_runs_at_one_port_do_not_take_each_others_processes(start_with, address):
    """The process of the second run fails, and the first run continues to wait."""
    first = start_with(await_processes, address, 2, "runs/one")
    connect(address).close()  # It listens now.
    member = start_with(join_processes, address, 1, 2, "runs/two", patience_s=0)
    ((code, text),) = collect_exits(member)
    assert code == WRONG_CONFIG
    assert "another run" in text
    assert not first.done()
    start_with(join_processes, address, 1, 2, "runs/one").result(PATIENCE_S)
    first.result(PATIENCE_S)


def test_refused_processes_are_named_when_the_time_is_up(start_with, address):
    first = start_with(await_processes, address, 2, "runs/one", patience_s=3)
    with connect(address) as stranger:
        stranger.sendall(hello_line(Hello(1, 2), "runs/two"))
        ((code, text),) = collect_exits(first)
    assert code == ABORTED
    assert "no sign of process 1" in text
    assert "belongs to another run" in text


def test_the_secret_of_a_launcher_overrides_the_runs_directory(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert job_secret("runs/one") == "runs/one"
    monkeypatch.setenv(SECRET_VARIABLE, "of the launcher")
    assert job_secret("runs/one") == "of the launcher"
    for line in (hello_line(Hello(1, 2), "of the launcher"), heard_line("of the laun")):
        assert b"laun" not in line  # The secret is never sent.
