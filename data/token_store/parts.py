"""Parts: files of tokens that wait to be put together.

A part is a row of segments, each a few MB of text: for each split its tokens, the
places among them where documents end, and those documents' ids; then what was skipped.
It appears whole or not at all. What is in it follows from its input and the settings.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tiktoken

from data.encoding import encode
from data.text.files import SPLITS, Split, Unit, hash_fraction
from data.text.records import Bad, Reading, Record


@dataclass(frozen=True)
class EncodingSettings:
    """All settings that decide the tokens of a text. A store's hash contains them."""

    tokenizer: str
    tokenizer_sha256: str | None
    reading: Reading
    validation: float  # part of the documents, by a hash of their ids
    skip_bad: bool


class SegmentSplit(NamedTuple):
    """One split's share of a segment."""

    tokens: np.ndarray  # in the store's dtype
    ends: np.ndarray  # int64: how many tokens lie before the end of each document
    ids: np.ndarray  # uint8: the documents' ids in UTF-8, end to end
    id_ends: np.ndarray  # int64


class Segment(NamedTuple):
    """A few MB of encoded text."""

    splits: dict[Split, SegmentSplit]
    notes: dict[str, Any]  # bytes of each split, empty documents, bad records


class SegmentBuilder:
    """A segment that is being filled."""

    def __init__(self, encoding: tiktoken.Encoding, validation: float):
        """Begin with nothing; `validation` is the part of documents held out."""
        self._encoding, self._validation = encoding, validation
        self._dtype = token_dtype(encoding)
        self._clear()

    def _clear(self) -> None:
        self._tokens = {s: [np.zeros(0, self._dtype)] for s in SPLITS}
        self._counts = dict.fromkeys(SPLITS, 0)
        self._ends: dict[Split, list[int]] = {split: [] for split in SPLITS}
        self._ids: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
        self._notes = {"bytes": dict.fromkeys(SPLITS, 0), "empty": 0, "bad": []}
        self.size = 0

    def add(self, record: Record | Bad, unit: Unit, complete: bool) -> int:
        """Encode a record; return how many tokens it gave.

        `complete`: nothing of its document came before it.
        """
        if isinstance(record, Bad):
            self._notes["bad"].append([record.file.path, record.place, record.reason])
            return 0
        if complete and record.ends and not record.text:
            self._notes["empty"] += 1
            return 0
        split = unit.split or split_of(record.id, self._validation)
        tokens = encode(self._encoding, record.text).astype(self._dtype)
        if record.ends and unit.marks_end:
            tokens = np.append(tokens, self._dtype.type(self._encoding.eot_token))
        self._tokens[split].append(tokens)
        self._counts[split] += len(tokens)
        if record.ends:
            self._ends[split].append(self._counts[split])
            self._ids[split].append(record.id.encode())
        self._notes["bytes"][split] += len(record.text)
        self.size += len(record.text) + 64
        return len(tokens)

    def write(self, file: BinaryIO) -> None:
        """Append the segment to a part, and begin another."""
        for split in SPLITS:
            ids = self._ids[split]
            np.save(file, np.concatenate(self._tokens[split]))
            np.save(file, np.array(self._ends[split], np.int64))
            np.save(file, np.frombuffer(b"".join(ids), np.uint8))
            np.save(file, np.cumsum([len(name) for name in ids], dtype=np.int64))
        np.save(file, np.frombuffer(json.dumps(self._notes).encode(), np.uint8))
        self._clear()


def read_part(path: Path) -> Iterator[Segment]:
    """Read the segments of a part, in order."""
    with path.open("rb") as file:
        size = path.stat().st_size
        while file.tell() < size:
            splits: dict[Split, SegmentSplit] = {
                split: SegmentSplit(*(np.load(file) for _ in SegmentSplit._fields))
                for split in SPLITS
            }
            yield Segment(splits, json.loads(np.load(file).tobytes()))


def split_of(document: str, validation: float) -> Split:
    """Choose a document's split by a hash of its id, wherever it comes from."""
    return "validation" if hash_fraction(document) < validation else "train"


def token_dtype(encoding: tiktoken.Encoding) -> np.dtype:
    """Return the least dtype that holds every id: uint16 or uint32, little-endian."""
    return np.dtype("<u2" if encoding.n_vocab <= 2**16 else "<u4")
