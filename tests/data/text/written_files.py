"""These functions write files of records and texts in each format, and read them."""

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from data.catalog import FORMATS
from data.text.documents import read_documents
from data.text.files import File, units_of
from data.text.plain_text import TEXT
from data.text.records import BadRecord, ReadSettings, Record

Found = list[Record | BadRecord]
WITH_IDS = ReadSettings(id_field="id")
LINE_FILES = ("a.jsonl", "a.NDJSON", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst")
COLUMN_FILES = ("a.parquet", "stream.arrow", "file.arrow")


def compress(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content, 1, mtime=0)
    if name.endswith(".zst"):
        return zstandard.ZstdCompressor(write_checksum=True).compress(content)
    return content


def frame_of_zstd(text: bytes, log: int) -> bytes:
    """Return a frame of magic number, descriptor, window, and a last raw block.

    Source: RFC 8878, 3.1.1.
    """
    block = (1 | len(text) << 3).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\x00" + bytes([log - 10 << 3]) + block + text


def encode_table(name: str, table: pa.Table) -> bytes:
    sink = io.BytesIO()
    if name.endswith(".parquet"):
        pq.write_table(table, sink, row_group_size=3)
        return sink.getvalue()
    open_writer = pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
    with open_writer(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


def encode_records(name: str, records: list[tuple[str, str]]) -> bytes:
    """Return a file of (id, text), or of all texts end to end if it has no records."""
    if name in COLUMN_FILES:
        schema = pa.schema({"n": pa.int32(), "id": pa.string(), "text": pa.string()})
        rows = [{"n": 1, "id": key, "text": text} for key, text in records]
        return encode_table(name, pa.Table.from_pylist(rows, schema))
    if name in LINE_FILES:
        rows = [json.dumps({"id": key, "n": 1, "text": text}) for key, text in records]
        return compress(name, "".join(f"{row}\n" for row in rows).encode())
    return compress(name, "".join(text for _, text in records).encode())


def write_file(folder: Path, name: str, content: bytes) -> File:
    """Write a file, and return how `classify` would describe it."""
    (folder / name).write_bytes(content)
    return named_file(folder / name, len(content))


def named_file(path: Path, size: int = 1) -> File:
    """Return a file whose name gives its format."""
    suffix = path.suffix if path.suffix in (".gz", ".zst") else None
    format = next((f for f in FORMATS if f.is_named(path.name)), TEXT)
    return File(str(path), path.name, size, "1", format, "", suffix)


def read_file(file: File, settings: ReadSettings = WITH_IDS) -> Found:
    return [item for unit in units_of(file) for item in read_documents(unit, settings)]


def good(items: Found) -> list[Record]:
    return [item for item in items if isinstance(item, Record)]
