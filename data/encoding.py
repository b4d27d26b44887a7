"""Bytes to token ids and back, losslessly, with tiktoken.

Any bytes round-trip through `encode` and `decode_bytes` with any vocabulary that
holds the 256 single bytes, also bytes that are not UTF-8. Only a folder's tokenizer may
say that text is normalized first: that comes back then. Text that contains the name of
a special token is text, never control.
"""

import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tiktoken

from data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
BYTES = "bytes"

# Longer text is encoded in pieces, each ending before white space where there is some:
# tiktoken holds dozens of bytes for each byte of a run without a break.
# Source: Meta's llama3, tokenizer.py, TIKTOKEN_MAX_ENCODE_CHARS, has this very limit.
_PIECE_CHARS = 400_000
# The characters that "surrogateescape" decodes invalid UTF-8 to.
_NOT_UTF8 = re.compile("([\udc80-\udcff])")

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]  # normalization forms of Unicode


class FolderEncoding(tiktoken.Encoding):
    """A folder's tokenizer, which may have rules for text before it is cut.

    form: that text is brought into; None: it stays as it is.
    words: tokens outside of the vocabulary that a text may spell.
    """

    def __init__(
        self,
        name: str,
        *,
        form: Form | None = None,
        words: Sequence[str] = (),
        **ranks: Any,
    ):
        """Make it of what `tiktoken.Encoding` takes besides."""
        super().__init__(name, **ranks)
        self.form: Form | None = form
        self.words = sorted(words, key=len, reverse=True)  # the longest is tried first
        self._word = re.compile(f"({'|'.join(map(re.escape, self.words))})")

    def __getstate__(self) -> dict[str, Any]:
        """Return what it is made of, for other processes."""
        return {
            "name": self.name,
            "pat_str": self._pat_str,
            "mergeable_ranks": self._mergeable_ranks,
            "special_tokens": self._special_tokens,
            **self.rules,
        }

    @property
    def rules(self) -> dict[str, Any]:
        """The rules by which text is normalized and split."""
        form = {"form": self.form} if self.form else {}
        return form | ({"words": self.words} if self.words else {})

    def parts(self, text: str) -> Iterator[str | int]:
        """Cut text as its rules say: the ids of words, and normalized text between."""
        for index, part in enumerate(self._word.split(text) if self.words else [text]):
            if index % 2:
                yield self._special_tokens[part]
            else:
                yield unicodedata.normalize(self.form, part) if self.form else part

    @functools.cached_property
    def isolating(self) -> tiktoken.Encoding:
        """The same tokenizer, of which text between two matches is a piece too.

        `tokenizers` encodes such text, tiktoken leaves it out. Raises ValueError if the
        pattern cannot be repeated within another one.
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


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Hash what decides the ids; the name does not."""
    digest = hashlib.sha256()
    # Source: tiktoken's README, "Extending tiktoken", documents these three.
    for token, rank in sorted(encoding._mergeable_ranks.items()):
        digest.update(b"%d:%d:%s;" % (rank, len(token), token))
    for special, rank in sorted(encoding._special_tokens.items()):
        digest.update(f"special {rank}:{len(special)}:{special};".encode())
    digest.update(encoding._pat_str.encode())
    if isinstance(encoding, FolderEncoding) and encoding.rules:
        digest.update(json.dumps(encoding.rules).encode())
    return digest.hexdigest()


def padded_vocab_size(encoding: tiktoken.Encoding) -> int:
    """Round the number of ids up to a multiple of 128, which any mesh can shard."""
    return -(-encoding.n_vocab // 128) * 128


def encode(encoding: tiktoken.Encoding, text: bytes) -> np.ndarray:
    """Encode bytes, valid UTF-8 or not, as ids: uint8 with "bytes", else uint32.

    The end-of-text token is never among them, whatever the text says. Raises DataError
    if the ids do not stand for the whole text, or tiktoken fails.
    """
    if encoding.name == BYTES:
        return np.frombuffer(text, np.uint8)
    pieces = _NOT_UTF8.split(text.decode("utf-8", "surrogateescape"))
    ids = [np.zeros(0, np.uint32)]
    for index, piece in enumerate(pieces):
        if index % 2:
            byte = piece.encode("utf-8", "surrogateescape")
            ids.append(np.array([encoding.encode_single_token(byte)], np.uint32))
            continue
        for short in short_pieces(piece):
            folder = isinstance(encoding, FolderEncoding)
            for part in encoding.parts(short) if folder else [short]:
                try:
                    word = isinstance(part, int)
                    ids.append(
                        np.array([part]) if word else encode_whole(encoding, part)
                    )
                except ValueError as error:
                    raise DataError(
                        f"tokenizer {encoding.name}: {error}. Take another tokenizer"
                    ) from error
    return np.concatenate(ids).astype(np.uint32, copy=False)


def encode_whole(encoding: tiktoken.Encoding, text: str) -> npt.NDArray[np.uint32]:
    """Encode text by pattern and ranks alone, and compare what the ids decode to.

    Raises ValueError if they do not stand for the whole text, or tiktoken fails.
    """
    try:
        ids = encoding.encode_to_numpy(text, disallowed_special=())
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # tiktoken's, and no Exception
            raise
        raise ValueError(f"tiktoken fails: {error}") from None
    if encoding.decode_bytes(ids.tolist()) == text.encode():
        return ids
    if isinstance(encoding, FolderEncoding):
        return encode_whole(encoding.isolating, text)
    raise ValueError(f"it loses a part of the text that begins {text[:20]!a}")


def short_pieces(text: str) -> Iterator[str]:
    """Cut text as `encode` does; what it cuts off is encoded as a text of its own."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        stop = start + _PIECE_CHARS
        last = max(text.rfind(space, start + 1, stop) for space in " \n")
        stop = stop if last < 0 else last
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def decode_bytes(encoding: tiktoken.Encoding, ids: np.ndarray | list[int]) -> bytes:
    """Decode ids of any integer dtype; those without a token stand for nothing."""
    ids = np.asarray(ids, np.int64).reshape(-1)
    ids = ids[(ids >= 0) & (ids < encoding.n_vocab)]
    if encoding.name == BYTES and not (ids == encoding.eot_token).any():
        return ids.astype(np.uint8).tobytes()
    try:
        return encoding.decode_bytes(ids.tolist())
    except KeyError:  # some vocabularies leave gaps between their special tokens
        values = {*encoding._mergeable_ranks.values()}
        values |= {*encoding._special_tokens.values()}
        return encoding.decode_bytes(
            [token for token in ids.tolist() if token in values]
        )


def decode(encoding: tiktoken.Encoding, ids: np.ndarray | list[int]) -> str:
    """Decode any ids, never raising: what is not UTF-8 becomes U+FFFD."""
    return decode_bytes(encoding, ids).decode("utf-8", "replace")
