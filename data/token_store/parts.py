"""Parts: files of encoded text from which a store is assembled.

A part is a sequence of segments, each a few MB of text. A segment holds the tokens,
document ends and document ids of each split, and then counts and the bad records. A
part appears complete or not at all, and depends on its input and the settings alone.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tiktoken

from data.encoding import encode
from data.splits import SPLITS, Split
from data.text.files import Unit, hash_fraction
from data.text.records import BadRecord, ReadSettings, Record


@dataclass(frozen=True)
class EncodingSettings:
    """All settings that determine a text's tokens; `build.input_hash` includes them."""

    tokenizer: str
    tokenizer_sha256: str | None
    reading: ReadSettings
    validation: float  # the fraction of documents to hold out
    skip_bad: bool


class SegmentSplit(NamedTuple):
    """The tokens and documents of one split in a segment."""

    tokens: np.ndarray  # in the store's dtype
    ends: np.ndarray  # int64: the end of each document in `tokens`
    ids: np.ndarray  # uint8: the documents' ids in UTF-8, concatenated
    id_ends: np.ndarray  # int64: the end of each id in `ids`


class StoreSegment(NamedTuple):
    """A few MB of encoded text."""

    splits: dict[Split, SegmentSplit]
    notes: dict[str, Any]  # bytes of each split, empty documents, bad records


class SegmentBuilder:
    """A segment that is being filled."""

    def __init__(self, encoding: tiktoken.Encoding, validation: float):
        """Begin an empty segment; `validation` is the fraction to hold out."""
        self._encoding = encoding
        self._validation = validation
        self._dtype = token_dtype(encoding)
        self._clear()

    def _clear(self) -> None:
        self._tokens = {s: [np.zeros(0, self._dtype)] for s in SPLITS}
        self._num_tokens = dict.fromkeys(SPLITS, 0)
        self._ends: dict[Split, list[int]] = {split: [] for split in SPLITS}
        self._ids: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
        self._notes = {"bytes": dict.fromkeys(SPLITS, 0), "empty": 0, "bad": []}
        self.size = 0

    def add(self, record: Record | BadRecord, unit: Unit, is_first: bool) -> int:
        """Add a record, and return the number of its tokens.

        `is_first` says that no earlier record belongs to the same document.
        """
        if isinstance(record, BadRecord):
            note = [record.file.path, record.location, record.reason]
            self._notes["bad"].append(note)
            return 0
        if is_first and record.ends and not record.text:
            self._notes["empty"] += 1
            return 0
        split = unit.split or split_of(record.id, self._validation)
        tokens = encode(self._encoding, record.text).astype(self._dtype)
        if record.ends and unit.marks_end:
            tokens = np.append(tokens, self._dtype.type(self._encoding.eot_token))
        self._tokens[split].append(tokens)
        self._num_tokens[split] += len(tokens)
        if record.ends:
            self._ends[split].append(self._num_tokens[split])
            self._ids[split].append(record.id.encode())
        self._notes["bytes"][split] += len(record.text)
        self.size += len(record.text) + 64
        return len(tokens)

    def write(self, file: BinaryIO) -> None:
        """Append the segment to a part file, and begin an empty segment."""
        for split in SPLITS:
            ids = self._ids[split]
            np.save(file, np.concatenate(self._tokens[split]))
            np.save(file, np.array(self._ends[split], np.int64))
            np.save(file, np.frombuffer(b"".join(ids), np.uint8))
            np.save(file, np.cumsum([len(name) for name in ids], dtype=np.int64))
        np.save(file, np.frombuffer(json.dumps(self._notes).encode(), np.uint8))
        self._clear()


def read_part(path: Path) -> Iterator[StoreSegment]:
    """Read the segments of a part, in order."""
    with path.open("rb") as file:
        size = path.stat().st_size
        while file.tell() < size:
            splits: dict[Split, SegmentSplit] = {
                split: SegmentSplit(*(np.load(file) for _ in SegmentSplit._fields))
                for split in SPLITS
            }
            yield StoreSegment(splits, json.loads(np.load(file).tobytes()))


def split_of(document: str, validation: float) -> Split:
    """Return the split of a document, which depends on a hash of its id."""
    return "validation" if hash_fraction(document) < validation else "train"


def token_dtype(encoding: tiktoken.Encoding) -> np.dtype:
    """Return the smallest dtype for all ids: uint16 or uint32, little-endian."""
    return np.dtype("<u2" if encoding.n_vocab <= 2**16 else "<u4")
