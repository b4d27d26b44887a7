"""Load a folder's tokenizer.json, written by transformers, as a tiktoken encoding.

A tokenizer is accepted only if tiktoken gives the same ids as `tokenizers` for every
text that does not contain the name of a special token. The tokenizer must be byte-level
BPE whose merges are in the order of their ids. It must split text by patterns, and may
only normalize Unicode before that. Text between two matches of a pattern is also
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
from data.tokenizer_checks import check_pattern, check_splits, checked_ranks, reason_of
from data.tokenizer_json import FILES, POSSESSIVE_COUNT, byte_names, merges_of

FILE = "tokenizer.json"
# An export writes this file as it was, and these settings of the model's.
GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"
TOKEN_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
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
        if not (folder / FILE).exists() and (folder / "tokenizer.model").exists():
            raise ValueError("there is none, only a SentencePiece model")
        content = _read(folder / FILE)
        files = _read_files(folder)
        config = json.loads(files.get("special_tokens_map.json", "{}"))
        config |= json.loads(files.get("tokenizer_config.json", "{}"))
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
        arguments = eos_token, bos_token, (*files.items(),)
        return _convert(name_with_digest, content, *arguments)
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


def _read_files(folder: Path) -> dict[str, str]:
    """Return the content of each file that an export writes as it was."""
    names = (*FILES, GENERATION_FILE)
    files = {x: _read(folder / x).decode() for x in names if (folder / x).exists()}
    if (folder / MODEL_FILE).exists():
        settings = json.loads(_read(folder / MODEL_FILE))
        ids = {key: settings[key] for key in TOKEN_IDS if key in settings}
        files[MODEL_FILE] = json.dumps(ids)
    return files


@functools.cache
def _convert(
    name: str,
    content: bytes,
    eos_token: str | None,
    bos_token: str | None,
    files: tuple[tuple[str, str], ...],
) -> tiktoken.Encoding:
    """Return the tokenizer of a tokenizer.json with this content.

    `bos_token` is the name of the token that tokenizer_config.json adds before a text.
    """
    tokenizer = json.loads(content)
    model = tokenizer["model"]
    added = tokenizer.get("added_tokens") or []
    _check_model(model)
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
    *splits, pattern = _patterns(tokenizer.get("pre_tokenizer"))
    check_splits(splits)
    check_pattern(pattern)
    return FolderEncoding(
        name,
        form=form,
        words=sorted({*words}),
        splits=splits,
        files=dict(files),
        bos_token=bos_id,
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens=special,
    )


def _check_model(model: Mapping[str, Any]) -> None:
    """Raise ValueError if a model is no byte-level BPE without further rules."""
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE" or model.get("byte_fallback"):
        kind = "SentencePiece's BPE with byte_fallback" if kind == "BPE" else kind
        raise ValueError(f"its model is {kind}, and no byte-level BPE")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise ValueError(f"its model has {key}={model[key]}")


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


def _patterns(pre_tokenizer: Mapping[str, Any] | None) -> list[str]:
    """Return the patterns by which text is split, one after another."""
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    *splits, byte_level = steps or [{}]
    has_prefix_space = byte_level.get("add_prefix_space")
    if byte_level.get("type") != "ByteLevel" or has_prefix_space:
        raise ValueError(f"text is cut in another way ({pre_tokenizer})")
    patterns = [_split_pattern(split) for split in splits]
    if byte_level.get("use_regex", True):
        patterns.append(_BYTE_LEVEL_PATTERN)
    return patterns or [r"(?s:.+)"]


def _split_pattern(step: Mapping[str, Any]) -> str:
    """Return the pattern whose matches a step of the pre-tokenizer isolates."""
    match step:
        case {
            "type": "Split",
            "pattern": {"Regex": str(pattern)},
            "behavior": "Isolated",
            "invert": False,
        } if pattern:
            if re.search(POSSESSIVE_COUNT, pattern):
                raise ValueError(
                    "its pattern repeats a count, which tiktoken reads differently"
                )
            return pattern
        case {
            "type": "Split",
            "pattern": {"String": str(text)},
            "behavior": "Isolated",
            "invert": False,
        } if text:
            return re.escape(text)
        case {"type": "Digits"}:
            return r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    raise ValueError(f"text is cut in another way ({step})")
