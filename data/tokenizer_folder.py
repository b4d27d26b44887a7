"""Load a folder's tokenizer.json, written by transformers, as a tiktoken encoding.

A tokenizer is accepted only if tiktoken gives the same ids as `tokenizers` for every
text that does not contain the name of a special token. The tokenizer must be byte-level
BPE whose merges are in the order of their ids. It must split text by one pattern, and
may only normalize Unicode before that. Text between two matches of the pattern is also
encoded. Any other tokenizer is refused with the reason, and so is a pattern that loses
text or backtracks without end. Tokens that a post-processor would add around a text are
left out of its ids. The token that it would add before a text is the encoding's
`bos_token`, with which documents begin in training.

Python's unicodedata normalizes text. For characters that Unicode added recently, the
result may differ from that of `tokenizers` (docs/log/weights.md).
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
from data.storage import check_regular
from data.tokenizer_checks import check_pattern, checked_ranks, reason_of
from data.tokenizer_json import POSSESSIVE_COUNT, byte_names, merges_of

FILE = "tokenizer.json"
# The exceptions that reading a malformed file may raise.
MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError)
MALFORMED += (RecursionError, OverflowError)
# Source: tokenizers 0.23, pre_tokenizers/byte_level.rs. The pattern is GPT-2's.
_BYTE_LEVEL_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_BYTE_OF = {character: byte for byte, character in enumerate(byte_names())}


def load_folder(name: str, sha256: str | None = None) -> tiktoken.Encoding:
    """Load a folder's tokenizer. If it has no <|endoftext|>, eos_token gets that name.

    Raises DataError if there is no tokenizer.json, `sha256` is not the file's hash, or
    tiktoken would give other ids.
    """
    folder = Path(name).expanduser()
    try:
        content = _read(folder / FILE)
        settings = folder / "tokenizer_config.json"
        config = json.loads(_read(settings)) if settings.exists() else {}
        digest = hashlib.sha256(content).hexdigest()
        if sha256 is not None and digest != sha256.lower():
            raise ValueError(f"SHA-256 is {digest}, but the config gives {sha256}")
        eos_token = config.get("eos_token")
        if isinstance(eos_token, dict):
            eos_token = eos_token.get("content")
        bos_token = config.get("bos_token") if config.get("add_bos_token") else None
        if isinstance(bos_token, dict):
            bos_token = bos_token.get("content")
        name_with_digest = f"{folder.name}:{digest[:12]}"
        return _convert(name_with_digest, content, eos_token, bos_token)
    except MALFORMED as error:
        raise DataError(
            f"tokenizer {name}: its {FILE} cannot be used: {reason_of(error)}. "
            f"Give text that is already encoded, or another tokenizer"
        ) from error


def digest_of(name: str) -> str | None:
    """Return the SHA-256 of a folder's tokenizer.json, or None if it does not exist."""
    file = Path(name).expanduser() / FILE
    return hashlib.sha256(_read(file)).hexdigest() if file.is_file() else None


def _read(file: Path) -> bytes:
    check_regular(file)
    return file.read_bytes()


@functools.cache
def _convert(
    name: str, content: bytes, eos_token: str | None, bos_token: str | None
) -> tiktoken.Encoding:
    """Return the tokenizer of a tokenizer.json with this content.

    `bos_token` is the name of the token that tokenizer_config.json adds before a text.
    """
    tokenizer = json.loads(content)
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError("it is no byte-level BPE, but a SentencePiece model")
    form = _form(tokenizer.get("normalizer"))
    special = {a["content"]: a["id"] for a in added}
    bos_id = _bos_token(tokenizer.get("post_processor"))
    if bos_id is None and bos_token is not None:
        bos_id = special[bos_token]
    vocabulary = [(_token(k), v) for k, v in model["vocab"].items() if k not in special]
    if END_OF_TEXT not in special:
        if eos_token not in special:
            raise ValueError(f"no {END_OF_TEXT}, and no eos_token beside it")
        special[END_OF_TEXT] = special.pop(eos_token)
    words = []
    for token in (a for a in added if not a.get("special")):
        if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            raise ValueError(f"{token['content']!r} is a token only in some places")
        if token["content"] in special:
            words.append(token["content"])
    ranks = checked_ranks(vocabulary, special)
    _check_merges(model, ranks)
    pattern = _pattern(tokenizer.get("pre_tokenizer"))
    check_pattern(pattern)
    return FolderEncoding(
        name,
        form=form,
        words=sorted({*words}),
        bos_token=bos_id,
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens=special,
    )


def _bos_token(post_processor: Mapping[str, Any] | None) -> int | None:
    """Return the id of the token that a post-processor adds directly before a text."""
    steps = [post_processor] if post_processor else []
    if post_processor and post_processor.get("type") == "Sequence":
        steps = post_processor["processors"]
    bos_id = None
    for step in steps:
        if step.get("cls"):  # BertProcessing and RobertaProcessing
            bos_id = int(step["cls"][1])
        for item in step.get("single", ()):  # TemplateProcessing
            if "Sequence" in item:
                break
            bos_id = int(step["special_tokens"][item["SpecialToken"]["id"]]["ids"][-1])
    return bos_id


def _form(normalizer: Mapping[str, Any] | None) -> Form | None:
    """Return the Unicode form to which text is normalized, or None."""
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
    """Check that merging in the order of ids equals merging in the order of the file.

    The file may list several pairs for a token. After all earlier merges, only one of
    them can occur in text: the pair to which these merges reduce the token's bytes.
    """
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    listed_merges = [(_token(a), _token(b)) for a, b in pairs]
    implied_merges = merges_of(ranks)
    implied_tokens = {*implied_merges}
    if [pair for pair in listed_merges if pair in implied_tokens] != implied_merges:
        raise ValueError("its merges do not stand in the order of its ids")
    if not model.get("ignore_merges") and len(implied_merges) != len(ranks) - 256:
        raise ValueError("some tokens are made by no merge")


def _pattern(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """Return the pattern by which text is split."""
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    *splits, byte_level = steps
    has_prefix_space = byte_level.get("add_prefix_space")
    if byte_level.get("type") == "ByteLevel" and not has_prefix_space:
        match splits, byte_level.get("use_regex", True):
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
                if not re.search(POSSESSIVE_COUNT, pattern):
                    return pattern
                raise ValueError(
                    "its pattern repeats a count, which tiktoken reads differently"
                )
    raise ValueError(f"text is cut in another way ({pre_tokenizer})")
