"""Check a tokenizer's file before tiktoken loads it, because tiktoken may panic."""

import functools
from collections.abc import Iterable, Mapping, Sequence

import regex

from data.encoding import FolderEncoding, encode_piece
from data.tokenizer_json import SAMPLE

MAX_ID = 2**24 - 1  # a model's embedding has a row for each id
MAX_TOKEN_BYTES = 1024  # the time to find a token's merges grows as its square
_REPEATS = 3000
_RUNS = ("a", "A", "1", " ", "\n", "\t", ".", "'", "猫", "é", "aA", "a ", "a1", " \n")


def reason_of(error: Exception) -> str:
    """Return an error about a tokenizer's file as one printable line."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    line = " ".join(reason.split())[:300]
    return line.encode(errors="backslashreplace").decode()


def checked_ranks(
    pairs: Iterable[tuple[bytes, int]], special: Mapping[str, int]
) -> dict[bytes, int]:
    """Check a vocabulary, and return it as a mapping from tokens to ids.

    Raises ValueError if an id is invalid or repeated, a token is empty, too long or
    repeated, or one of the single bytes is missing.
    """
    ranks = dict[bytes, int]()
    names = dict[int, str]()
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
    """Check that a pattern splits a sample of text without losing any of it.

    Raises ValueError if text is lost, or the regex engine fails. The engine gives up
    after a million backtracking steps for each match, so the check always ends.
    """
    try:
        encoding = FolderEncoding(
            "sample",
            pat_str=pattern,
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={},
        )
        for text in (SAMPLE, *(run * _REPEATS for run in _RUNS)):
            encode_piece(encoding, text)
    except ValueError as error:
        raise ValueError(f"its pattern fails on a sample of text ({error})") from error


def check_splits(patterns: Sequence[str]) -> None:
    """Check that patterns cut a sample of text within a minute, and never match "".

    Raises ValueError if they do not.
    """
    for pattern in patterns:
        try:
            if "&&" in pattern:
                raise ValueError("it intersects sets, which differs between engines")
            compiled = regex.compile(pattern, regex.MULTILINE)
            for text in (SAMPLE, *(run * _REPEATS for run in _RUNS)):
                if any(not x[0] for x in compiled.finditer(text, timeout=60)):
                    raise ValueError("it matches empty text")
        except (ValueError, TimeoutError, regex.error) as error:
            raise ValueError(
                f"its pattern {pattern!r} cannot be used ({error})"
            ) from error
