"""The files of a token store: their names, and the sizes of chunks and shards.

    <store>/<split>/tokens      uint16 or uint32, one flat array
    <store>/<split>/offsets     int64, the start of each document, then the end
    <store>/<split>/index       int64, the number of document starts before each chunk
    <store>/<split>/ids         uint8, the documents' ids in UTF-8, concatenated
    <store>/<split>/id_offsets  int64, the start of each id, then the end
    <store>/<split>/<array>.crc32c  uint32, the checksum of each chunk of an array
    <store>/tokenizer.tiktoken  the rank file, if the tokenizer has one
    <store>/skipped.jsonl       skipped records: file, place, reason
    <store>/<split>/runs        int64: where tokens lie, if they stay in other files
    <store>/manifest.json       written last: a folder without one is no store

The arrays are sharded zarr v3, and each chunk ends with its CRC-32C. The manifest holds
the SHA-256 of every array's values and of every small file, such as the .crc32c files.
A shard that belongs to another store is therefore noticed when one of its chunks is
read. The manifest's own SHA-256 is in manifest.json.sha256.
"""

import google_crc32c
import numpy as np

SCHEMA = 2
MANIFEST = "manifest.json"
RANKS = "tokenizer.tiktoken"  # the rank file, if the tokenizer has one
MANIFEST_DIGEST = "manifest.json.sha256"
SKIPPED = "skipped.jsonl"
RUNS = "runs"
# A chunk is the smallest unit that is checked; a shard is one file. Both in values.
CHUNK_LENGTH = 2**14
SHARD_LENGTH = 2**25
ARRAYS = ("tokens", "offsets", "index", "ids", "id_offsets")


def checksum_file(split: str, array: str) -> str:
    """Return the name of the file that holds the checksums of an array's chunks."""
    return f"{split}/{array}.crc32c"


def chunk_checksums(values: np.ndarray) -> np.ndarray:
    """Return the CRC-32C of each chunk; the values begin at the start of a chunk."""
    size = CHUNK_LENGTH * values.itemsize
    starts = range(0, len(values), CHUNK_LENGTH)
    chunks = (values[start : start + CHUNK_LENGTH].tobytes() for start in starts)
    checksums = [google_crc32c.value(chunk.ljust(size, b"\0")) for chunk in chunks]
    return np.array(checksums, "<u4")
