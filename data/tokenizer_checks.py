"""Check what a tokenizer's file says before tiktoken, which panics, is given it.

A pattern is tried on a sample in a process of its own: its engine may exhaust the
stack or the memory, or never end.
"""

import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from data.encoding import FolderEncoding, encode_whole
from data.tokenizer_json import SAMPLE

MAX_ID = 2**24 - 1  # a model's table has a row for each id
MAX_TOKEN_BYTES = 1024  # finding the merges of a token takes the square of its length
# A usual pattern takes a second, nearly all of it to start Python. The deadline is
# longer than the limit of CPU time, because a slow disk may delay the imports.
DEADLINE_S = 1200.0
_CPU_S, _MEMORY_BYTES = 120, 2**34
_RUN = 3000  # characters
_RUNS = ("a", "A", "1", " ", "\n", "\t", ".", "'", "猫", "é", "aA", "a ", "a1", " \n")


def reason_of(error: Exception) -> str:
    """Return in a line that can be printed what is wrong with a tokenizer's file."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    line = " ".join(reason.split())[:300]
    return line.encode(errors="backslashreplace").decode()


def checked_ranks(
    pairs: Iterable[tuple[bytes, int]], special: Mapping[str, int]
) -> dict[bytes, int]:
    """Return the vocabulary as a table.

    Raises:
        ValueError: it has a wrong or repeated id, an empty or repeated token, or no
            token of one of the bytes.
    """
    ranks, names = dict[bytes, int](), dict[int, str]()
    for token, rank in pairs:
        if token in ranks:
            raise ValueError(f"the token {token[:40]!r} occurs twice")
        ranks[token] = rank
    for token, rank in (*ranks.items(), *special.items()):
        name = ascii(token[:40])
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise ValueError(
                f"the token {name} has {len(token)} bytes, not 1 to {MAX_TOKEN_BYTES}"
            )
        if isinstance(token, str) and any("\ud800" <= c <= "\udfff" for c in token):
            raise ValueError(f"the token {name} holds half a surrogate pair")
        if type(rank) is not int or not 0 <= rank <= MAX_ID:
            shown = ascii(rank)[:40]
            raise ValueError(f"the id of {name} is {shown}, not one of 0 to {MAX_ID}")
        if rank in names:
            raise ValueError(f"the id {rank} is of {names[rank]} and of {name}")
        names[rank] = name
    if missing := {bytes([byte]) for byte in range(256)} - {*ranks}:
        raise ValueError(f"the byte {min(missing)!r} has no token")
    return ranks


@functools.cache
def check_pattern(pattern: str) -> None:
    """Check that a pattern cuts a sample of text into pieces that are the whole of it.

    Raises:
        ValueError: text is lost, the engine fails, or does not end.
    """
    root = str(Path(__file__).parents[1])
    paths = filter(None, (root, os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "data.tokenizer_checks"]
    try:
        done = subprocess.run(
            command,
            input=pattern.encode(),
            capture_output=True,
            timeout=DEADLINE_S,
            env=environment,
            start_new_session=True,  # a notice to the process group is not for it
        )
    except subprocess.TimeoutExpired:
        raise _endless(DEADLINE_S) from None
    if done.returncode == -signal.SIGXCPU:
        raise _endless(_CPU_S)
    if done.returncode:
        reason = done.stdout.decode().strip() or f"exit code {done.returncode}"
        raise ValueError(f"its pattern fails on a sample of text ({reason})")


def _endless(seconds: float) -> ValueError:
    return ValueError(
        f"its pattern backtracks without end: it does not cut a sample within "
        f"{seconds:g} seconds"
    )


def _limit(kind: int, maximum: int) -> None:
    """Lower a limit of this process. A lower one that the system has set stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        maximum = min(maximum, hard)
    with contextlib.suppress(ValueError, OSError):  # some systems lack some limits
        resource.setrlimit(kind, (maximum, hard))


def _try_pattern() -> int:
    """Encode samples with the pattern on stdin; print why that fails."""
    _limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    _limit(resource.RLIMIT_CPU, _CPU_S)
    _limit(resource.RLIMIT_CORE, 0)
    try:
        encoding = FolderEncoding(
            "sample",
            pat_str=sys.stdin.buffer.read().decode(),
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={},
        )
        for text in (SAMPLE, *(run * _RUN for run in _RUNS)):
            encode_whole(encoding, text)
    except ValueError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_try_pattern())
