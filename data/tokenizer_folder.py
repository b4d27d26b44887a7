"""Tokenizers of a folder that transformers wrote: tokenizer.json, read for tiktoken.

A tokenizer is taken if tiktoken must give the same ids as `tokenizers` does, for any
text that does not spell a special token: byte-level BPE whose merges stand in the order
of its ids, of text that is cut by one pattern, at most brought into a form of Unicode's
before. Text between two matches of the pattern is a piece too. Any other tokenizer is
refused with the reason, and so is a pattern that loses text or backtracks without end.
What a post-processor adds around a text is left out.

The forms are those of Python's unicodedata, which for characters of the last few years
may differ from those of `tokenizers` (docs/log).
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiktoken

from data.encoding import END_OF_TEXT, FolderEncoding, Form
from data.errors import DataError
from data.tokenizer_checks import check_pattern, checked_ranks, reason_of
from data.tokenizer_json import COUNTED, byte_names, merges_of

FILE = "tokenizer.json"
# The exceptions that reading a malformed file may raise.
MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError)
MALFORMED += (RecursionError, OverflowError)
# Source: tokenizers 0.23, pre_tokenizers/byte_level.rs: it is GPT-2's.
_BYTE_LEVEL_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_BYTE_OF = {character: byte for byte, character in enumerate(byte_names())}


def load_folder(name: str, sha256: str | None = None) -> tiktoken.Encoding:
    """Load the tokenizer of a folder; <|endoftext|> is its own, or else its eos_token.

    Raises DataError if there is none, if it is not the one of that hash, or if its ids
    would differ.
    """
    folder = Path(name).expanduser()
    try:
        content = (folder / FILE).read_bytes()
        settings = folder / "tokenizer_config.json"
        end = json.loads(settings.read_bytes()) if settings.exists() else {}
        digest = hashlib.sha256(content).hexdigest()
        if sha256 is not None and digest != sha256.lower():
            raise ValueError(f"SHA-256 is {digest}, but the config gives {sha256}")
        end = end.get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
        return _encoding(f"{folder.name}:{digest[:12]}", content, end)
    except MALFORMED as error:
        raise DataError(
            f"tokenizer {name}: its {FILE} cannot serve: {reason_of(error)}. "
            f"Give text that is encoded already, or another tokenizer"
        ) from error


def digest_of(name: str) -> str | None:
    """Return the SHA-256 of a folder's tokenizer; None if the name means none."""
    file = Path(name).expanduser() / FILE
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


@functools.cache
def _encoding(name: str, content: bytes, end: str | None) -> tiktoken.Encoding:
    """Convert a tokenizer; `end` is what ends a text."""
    tokenizer = json.loads(content)
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError("it is no byte-level BPE, but of SentencePiece's kind")
    form = _form(tokenizer.get("normalizer"))
    special = {a["content"]: a["id"] for a in added}
    vocabulary = [(_token(k), v) for k, v in model["vocab"].items() if k not in special]
    if END_OF_TEXT not in special:
        if end not in special:
            raise ValueError(f"no {END_OF_TEXT}, and no eos_token beside it")
        special[END_OF_TEXT] = special.pop(end)
    words = []
    for word in (a for a in added if not a.get("special")):
        if any(word.get(way) for way in ("lstrip", "rstrip", "single_word")):
            raise ValueError(f"{word['content']!r} is a token only in some places")
        if word["content"] in special:
            words.append(word["content"])
    ranks = checked_ranks(vocabulary, special)
    _check_merges(model, ranks)
    pattern = _pattern(tokenizer.get("pre_tokenizer"))
    check_pattern(pattern)
    return FolderEncoding(
        name,
        form=form,
        words=sorted({*words}),
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens=special,
    )


def _form(normalizer: Mapping[str, Any] | None) -> Form | None:
    """Return the form that text is brought into before it is cut, if into any."""
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer.get("type") == "Sequence":
        steps = normalizer["normalizers"]
    match [step["type"] for step in steps]:
        case []:
            return None
        case ["NFC" | "NFD" | "NFKC" | "NFKD" as form]:
            return form
    raise ValueError(f"it changes text before it is cut (normalizer {normalizer})")


def _token(name: str) -> bytes:
    """Return the bytes that the characters of a token's name stand for."""
    try:
        return bytes(_BYTE_OF[character] for character in name)
    except KeyError:
        raise ValueError(f"the token {name!r} is not named by bytes") from None


def _check_merges(model: Mapping[str, Any], ranks: dict[bytes, int]) -> None:
    """Check that merging by ids is merging by the list.

    Of the pairs that make a token only one can ever lie side by side once all earlier
    merges are done, inside of any text: that of the token's own bytes.
    """
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    listed = [(_token(a), _token(b)) for a, b in pairs]
    implied = merges_of(ranks)
    tokens = {*implied}
    if [pair for pair in listed if pair in tokens] != implied:
        raise ValueError("its merges do not stand in the order of its ids")
    if not model.get("ignore_merges") and len(implied) != len(ranks) - 256:
        raise ValueError("some tokens are made by no merge")


def _pattern(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """Return the pattern by which text is cut."""
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    *splits, level = steps
    if level.get("type") == "ByteLevel" and not level.get("add_prefix_space"):
        match splits, level.get("use_regex", True):
            case [], True:
                return _BYTE_LEVEL_PATTERN
            case [], False:
                return r"(?s:.+)"
            case [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                }
            ], False if pattern:
                if not re.search(COUNTED, pattern):
                    return pattern
                raise ValueError(
                    "its pattern repeats a count, which tiktoken reads otherwise"
                )
    raise ValueError(f"text is cut in another way ({pre_tokenizer})")
