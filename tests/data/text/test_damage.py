"""Text before or after damage is read, and an error names what cannot be read."""

import gzip
import io
import random
from pathlib import Path

import fsspec
import pytest

from data.errors import DataError
from data.text.records import BadRecord, ReadSettings, Record
from tests.data.text.written_files import (
    COLUMN_FILES,
    WITH_IDS,
    encode_records,
    good,
    named_file,
    read_file,
    write_file,
)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst"])
def test_text_before_damage_is_read(tmp_path, name):
    """The file is cut off anywhere, or overwritten from some byte on."""
    source = random.Random(0)
    records = [(str(n), source.randbytes(2500).hex() + "猫") for n in range(400)]
    content = encode_records(name, records)
    settings = WITH_IDS if "jsonl" in name else ReadSettings()
    intact = read_file(write_file(tmp_path, name, content), settings)
    total = sum(len(item.text) for item in good(intact))
    for trial in range(12):
        offset = source.randrange(len(content) // 8, len(content))
        broken = content[:offset] + b"\xff" * (len(content) - offset) * (trial % 2)
        result = read_file(write_file(tmp_path, name, broken), settings)
        texts = b"".join(item.text for item in good(result))
        assert isinstance(result[-1], BadRecord)
        assert "cannot be read further" in result[-1].reason
        assert [isinstance(item, BadRecord) for item in result].count(True) <= 2
        # The last block may be missing, or its damaged bytes may be present.
        assert len(texts) >= total * offset / len(content) - 3e5
        if trial % 2 == 0:
            texts.decode()
            assert b"".join(item.text for item in good(intact)).startswith(texts)
    with_zeros = read_file(
        write_file(tmp_path, "b.txt.gz", gzip.compress(b"a") + bytes(9))
    )
    assert with_zeros == [Record("b.txt.gz", b"a", True)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", *COLUMN_FILES, "a.txt"])
@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("gone")])
def test_a_storage_failure_is_not_a_bad_record(tmp_path, monkeypatch, name, error):
    """Otherwise on_error=skip would leave out half a file when a network breaks."""
    records = [(str(n), "text" * 9) for n in range(3)]
    file = write_file(tmp_path, name, encode_records(name, records))
    reads = []

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            reads.append(1)
            if len(reads) > 1:
                raise error
            return super().read(8)

    content = Path(file.path).read_bytes()
    monkeypatch.setattr(fsspec, "open", lambda *_: Failing(content))
    with pytest.raises(DataError, match=rf"{name}: cannot be read \(gone\)"):
        read_file(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        read_file(named_file(tmp_path / "gone.jsonl"))


def damage_randomly(content: bytes, source: random.Random) -> bytes:
    damage = bytearray(content)
    for _ in range(source.choice([1, 1, 1, 3, 20])):
        index = source.randrange(len(damage) or 1)
        kind = source.randrange(5)
        if kind == 0:
            damage[index : index + 1] = bytes([source.randrange(256)])
        elif kind == 1:
            damage[index : index + 1] = bytes(
                [damage[index] ^ 1 << source.randrange(8)]
            )
        elif kind == 2:
            del damage[index : index + source.randrange(1, 9)]
        elif kind == 3:
            damage[index:index] = source.randbytes(source.randrange(1, 9))
        else:
            damage[index : index + 8] = source.choice([b"\xff", b"\0", b"\x7f"]) * 8
        damage = damage or bytearray(b"\n")
    return bytes(damage)


@pytest.mark.parametrize("trials", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "a.jsonl.zst", *COLUMN_FILES, "a.txt.gz"]
)
def test_random_damage_is_reported_and_raises_nothing(tmp_path, name, trials):
    source = random.Random(trials)
    records = [(f"id {n}", "ab 猫\n" * n) for n in range(8)]
    content = encode_records(name, records)
    intact = read_file(write_file(tmp_path, name, content))
    reported = 0
    for _ in range(trials):
        file = write_file(tmp_path, name, damage_randomly(content, source))
        result = read_file(file)
        for record in good(result):
            record.text.decode()
        reported += len(good(result)) < len(result)
        if len(good(result)) == len(result) and name not in COLUMN_FILES:
            assert result == intact, "both compressions hold a checksum"
    assert reported > trials // 3
