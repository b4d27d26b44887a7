"""Convert bytes to token ids and back, without loss, with tiktoken.

With any vocabulary that holds the 256 single bytes, `decode_bytes` restores the bytes
given to `encode`, even if they are not UTF-8. The exception is a `FolderEncoding` that
normalizes text: decoding then returns the normalized text. The name of a special token
in a text is encoded as ordinary text.
"""

import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import regex
import tiktoken

from data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
BYTES = "bytes"

# Text longer than this is encoded in pieces, which end before white space if possible.
# Within text that the pattern does not split, tiktoken needs dozens of bytes of memory
# for each byte. Source of the limit: Meta's llama3, tokenizer.py,
# TIKTOKEN_MAX_ENCODE_CHARS.
_PIECE_CHARS = 400_000
# The characters to which "surrogateescape" decodes invalid bytes.
_INVALID_BYTE = re.compile("([\udc80-\udcff])")

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]  # normalization forms of Unicode


class FolderEncoding(tiktoken.Encoding):
    """The tokenizer of a folder, with rules for normalizing and splitting text.

    form: The Unicode form to which text is normalized; None leaves text unchanged.
    words: Added tokens outside of the BPE vocabulary that are recognized in text. They
        may contain spaces.
    splits: Patterns that cut text in this order, before the tokenizer's own pattern
        does. Their matches and the text between matches are encoded independently.
    files: The content of the folder's files, by name (data/tokenizer_folder.py).
    bos_token: The id of the token that the tokenizer adds before each text, or None.
    """

    def __init__(
        self,
        name: str,
        *,
        form: Form | None = None,
        words: Sequence[str] = (),
        splits: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        bos_token: int | None = None,
        **arguments: Any,
    ):
        """Pass the other `arguments` to `tiktoken.Encoding`."""
        super().__init__(name, **arguments)
        self.splits = [*splits]
        self.files = dict(files or {})
        # Oniguruma, the engine of `tokenizers`, always reads ^ and $ as ends of lines.
        self._splits = [regex.compile(split, regex.MULTILINE) for split in self.splits]
        if bos_token is not None:
            self.decode_single_token_bytes(bos_token)  # KeyError: no such token
        self.bos_token = bos_token
        self.form: Form | None = form
        self.words = sorted(words, key=len, reverse=True)  # the longest is tried first
        self._any_word = re.compile(f"({'|'.join(map(re.escape, self.words))})")

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments with which unpickling calls `__init__`."""
        bos = {} if self.bos_token is None else {"bos_token": self.bos_token}
        return {
            "name": self.name,
            "pat_str": self._pat_str,
            "mergeable_ranks": self._mergeable_ranks,
            "special_tokens": self._special_tokens,
            **self.rules,
            **({"files": self.files} if self.files else {}),
            **bos,
        }

    @property
    def rules(self) -> dict[str, Any]:
        """The rules by which text is normalized and split."""
        rules = {"form": self.form, "words": self.words, "splits": self.splits}
        return {name: rule for name, rule in rules.items() if rule}

    def apply_rules(self, text: str) -> Iterator[str | int]:
        """Yield a text as ids of `words`, and as normalized pieces between them."""
        spans = self._any_word.split(text) if self.words else [text]
        for index, span in enumerate(spans):
            if index % 2:  # one of `words`
                yield self._special_tokens[span]
                continue
            pieces = [unicodedata.normalize(self.form, span) if self.form else span]
            for split in self._splits:
                pieces = [cut for piece in pieces for cut in _isolate(split, piece)]
            yield from pieces

    @functools.cached_property
    def gapless_encoding(self) -> tiktoken.Encoding:
        """The same tokenizer with a pattern that matches all text without gaps.

        `tokenizers` encodes text that the pattern does not match, but tiktoken drops
        it. Raises ValueError if the pattern refers to its own groups, because the new
        pattern contains it twice.
        """
        pattern = self._pat_str
        if re.search(r"\\([1-9]|k)", pattern):
            raise ValueError("its pattern refers to its own groups, and loses text")
        return tiktoken.Encoding(
            self.name,
            pat_str=rf"(?:{pattern})|(?:(?!{pattern})[\s\S])+",
            mergeable_ranks=self._mergeable_ranks,
            special_tokens=self._special_tokens,
        )


def _isolate(pattern: regex.Pattern[str], text: str) -> Iterator[str]:
    """Yield the matches of a pattern, and the text between matches.

    An empty text is yielded as it is.
    """
    start = 0
    for match in pattern.finditer(text):
        if match.start() > start:
            yield text[start : match.start()]
        if match.end() > match.start():
            yield match[0]
        start = match.end()
    if start < len(text) or not text:
        yield text[start:]


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Return a hash of everything that determines the ids, but not of the name."""
    digest = hashlib.sha256()
    # Source: tiktoken's README, "Extending tiktoken", documents these attributes.
    for token, rank in sorted(encoding._mergeable_ranks.items()):
        digest.update(b"%d:%d:%s;" % (rank, len(token), token))
    for special, rank in sorted(encoding._special_tokens.items()):
        digest.update(f"special {rank}:{len(special)}:{special};".encode())
    digest.update(encoding._pat_str.encode())
    if isinstance(encoding, FolderEncoding) and encoding.rules:
        digest.update(json.dumps(encoding.rules).encode())
    return digest.hexdigest()


def padded_vocab_size(encoding: tiktoken.Encoding) -> int:
    """Return the number of ids, rounded up to a multiple of 128 for sharding."""
    return -(-encoding.n_vocab // 128) * 128


def encode(encoding: tiktoken.Encoding, text: bytes) -> np.ndarray:
    """Encode bytes, valid UTF-8 or not. Ids are uint8 for "bytes", otherwise uint32.

    The ids never contain the end-of-text token. Raises DataError if decoding them would
    not restore the text, or tiktoken fails.
    """
    if encoding.name == BYTES:
        return np.frombuffer(text, np.uint8)
    spans = _INVALID_BYTE.split(text.decode("utf-8", "surrogateescape"))
    ids = [np.zeros(0, np.uint32)]
    for index, span in enumerate(spans):
        if index % 2:  # an invalid byte
            byte = span.encode("utf-8", "surrogateescape")
            ids.append(np.array([encoding.encode_single_token(byte)], np.uint32))
            continue
        for piece in short_pieces(span):
            is_folder = isinstance(encoding, FolderEncoding)
            for item in encoding.apply_rules(piece) if is_folder else [piece]:
                if isinstance(item, int):
                    ids.append(np.array([item], np.uint32))
                    continue
                try:
                    ids.append(encode_piece(encoding, item))
                except ValueError as error:
                    raise DataError(
                        f"tokenizer {encoding.name}: {error}. Take another tokenizer"
                    ) from error
    return np.concatenate(ids).astype(np.uint32, copy=False)


def encode_piece(encoding: tiktoken.Encoding, text: str) -> npt.NDArray[np.uint32]:
    """Encode normalized text in one call, and check that decoding restores it.

    Raises ValueError if decoding does not restore the text, or tiktoken fails.
    """
    try:
        ids = encoding.encode_to_numpy(text, disallowed_special=())
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic of tiktoken
            raise
        raise ValueError(f"tiktoken fails: {error}") from None
    if encoding.decode_bytes(ids.tolist()) == text.encode():
        return ids
    if isinstance(encoding, FolderEncoding):
        return encode_piece(encoding.gapless_encoding, text)
    raise ValueError(f"it loses a part of the text that begins {text[:20]!a}")


def short_pieces(text: str) -> Iterator[str]:
    """Yield the pieces of a text that `encode` encodes independently."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        stop = start + _PIECE_CHARS
        last_space = max(text.rfind(space, start + 1, stop) for space in " \n")
        stop = stop if last_space < 0 else last_space
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def decode_bytes(encoding: tiktoken.Encoding, ids: np.ndarray | list[int]) -> bytes:
    """Decode ids of any integer dtype to bytes. Ids without a token are skipped."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    ids = ids[(ids >= 0) & (ids < encoding.n_vocab)]
    if encoding.name == BYTES and not (ids == encoding.eot_token).any():
        return ids.astype(np.uint8).tobytes()
    try:
        return encoding.decode_bytes(ids.tolist())
    except KeyError:  # some vocabularies leave gaps between their special tokens
        valid_ids = {*encoding._mergeable_ranks.values()}
        valid_ids |= {*encoding._special_tokens.values()}
        return encoding.decode_bytes(
            [token_id for token_id in ids.tolist() if token_id in valid_ids]
        )


def decode(encoding: tiktoken.Encoding, ids: np.ndarray | list[int]) -> str:
    """Decode any ids to text. Invalid UTF-8 becomes U+FFFD and raises no error."""
    return decode_bytes(encoding, ids).decode("utf-8", "replace")
