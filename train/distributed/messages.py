"""The messages of the rendezvous: one line of JSON each, short, and signed.

Anything on the network may connect to the port of process 0, or answer in its place. So
a message is read up to a limit, its types are checked, and a digest shows that its
sender knows the secret of the job. The secret itself is never sent.
"""

import hashlib
import hmac
import json
import os
from typing import Any, NamedTuple

SECRET_VARIABLE = "LONGHAUL_JOB_SECRET"
MAX_HELLO_BYTES = 512
MAX_ANSWER_BYTES = 64 * 1024  # an answer may list missing processes
_MAX_TEXT = 4_000
_MAX_PROCESSES = 10**9


class Hello(NamedTuple):
    """A process's first message: its number and the process count it expects."""

    process: int
    processes: int


class Verdict(NamedTuple):
    """Process 0's last message: an exit code and a reason, or no code to go on."""

    code: int | None = None
    wrong: str = ""


class NotOurs(Exception):
    """A message that no process of this job has sent; the text says why."""


class OtherRun(NotOurs):
    """A message of a process that has another secret, so it belongs to another run."""


def job_secret(run: str) -> str:
    """Return the secret that a launcher has handed out, otherwise the run's identity.

    All processes of a job get the same secret, and no other job does.
    """
    return os.environ.get(SECRET_VARIABLE) or run


def hello_line(hello: Hello, secret: str) -> bytes:
    """Return a process's first message, signed."""
    return _line({**hello._asdict(), **_signature(secret, "process")})


def heard_line(secret: str) -> bytes:
    """Return process 0's first answer, signed."""
    return _line({"heard": True, **_signature(secret, "process 0")})


def refusal_line() -> bytes:
    """Return process 0's answer to a process of another run."""
    return _line({"heard": False})


def verdict_line(verdict: Verdict) -> bytes:
    """Return process 0's last message."""
    is_failure = verdict.code is not None
    wrong = verdict.wrong[:_MAX_TEXT]
    return _line({"code": verdict.code, "wrong": wrong} if is_failure else {})


def parse_hello(line: bytes, secret: str) -> Hello:
    """Return the content of a first message.

    Raises:
        NotOurs: no process of this job has sent it.
    """
    message = _parse(line)
    numbers = [message.get(name) for name in Hello._fields]
    counts = [n for n in numbers if type(n) is int and 0 <= n < _MAX_PROCESSES]
    if len(counts) < len(numbers):
        raise NotOurs("gives no number of a process")
    _check_signature(message, secret, "process")
    return Hello(*counts)


def check_heard(line: bytes, secret: str) -> None:
    """Raise NotOurs unless process 0 of this job has sent a first answer."""
    message = _parse(line)
    if message.get("heard") is not True:
        raise NotOurs("is not process 0 of a run that begins")
    _check_signature(message, secret, "process 0")


def parse_verdict(line: bytes) -> Verdict:
    """Return the content of a last message, from a process 0 that has been checked.

    Raises:
        NotOurs: the message is incomplete.
    """
    message = _parse(line)
    code = message.get("code")
    wrong = message.get("wrong", "")
    if message and not (type(code) is int and 0 < code < 256 and type(wrong) is str):
        raise NotOurs("does not say why it ends the job")
    return Verdict(code, wrong)


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # ValueError includes UnicodeDecodeError
        message = None
    if not line.endswith(b"\n") or not isinstance(message, dict):
        raise NotOurs("sends something else than a message of a run")
    return message


def _signature(secret: str, sender: str) -> dict[str, str]:
    text = f"longhaul rendezvous, {sender}".encode()
    key = secret.encode(errors="backslashreplace")
    return {"key": hmac.digest(key, text, hashlib.sha256).hex()} if secret else {}


def _check_signature(message: dict[str, Any], secret: str, sender: str) -> None:
    expected = _signature(secret, sender).get("key", "")
    sent = message.get("key", "")
    if type(sent) is not str or not hmac.compare_digest(
        sent.encode(errors="backslashreplace"), expected.encode()
    ):
        raise OtherRun("belongs to another run, or has another secret")
