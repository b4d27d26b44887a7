"""Files that are damaged, gone, or cannot be read: all else is read, or it is said."""

import gzip
import io
import random
from pathlib import Path

import fsspec
import pytest

from data.errors import DataError
from data.text.records import BadRecord, ReadSettings, Record
from tests.data.text.written_files import (
    COLUMNS,
    WITH_IDS,
    encode_records,
    file_of,
    good,
    named_file,
    read_file,
)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst"])
def test_what_comes_before_damage_is_read(tmp_path, name):
    """Cut off anywhere, or overwritten from some place on."""
    source = random.Random(0)
    records = [(str(n), source.randbytes(2500).hex() + "猫") for n in range(400)]
    content = encode_records(name, records)
    settings = WITH_IDS if "jsonl" in name else ReadSettings()
    whole = read_file(file_of(tmp_path, name, content), settings)
    total = sum(len(one.text) for one in good(whole))
    for trial in range(12):
        at = source.randrange(len(content) // 8, len(content))
        damaged = content[:at] + b"\xff" * (len(content) - at) * (trial % 2)
        found = read_file(file_of(tmp_path, name, damaged), settings)
        texts = b"".join(one.text for one in good(found))
        assert isinstance(found[-1], BadRecord)
        assert "cannot be read further" in found[-1].reason
        assert [isinstance(one, BadRecord) for one in found].count(True) <= 2
        # The last block's worth may be missing, and what damage made of it be there.
        assert len(texts) >= total * at / len(content) - 3e5
        if trial % 2 == 0:
            texts.decode()
            assert b"".join(one.text for one in good(whole)).startswith(texts)
    with_zeros = read_file(
        file_of(tmp_path, "b.txt.gz", gzip.compress(b"a") + bytes(9))
    )
    assert with_zeros == [Record("b.txt.gz", b"a", True)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", *COLUMNS, "a.txt"])
@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("gone")])
def test_storage_that_fails_is_no_bad_record(tmp_path, monkeypatch, name, error):
    """Else on_error=skip would leave out half a file when a network breaks."""
    records = [(str(n), "text" * 9) for n in range(3)]
    file = file_of(tmp_path, name, encode_records(name, records))
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


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        read_file(named_file(tmp_path / "gone.jsonl"))


def damaged(content: bytes, source: random.Random) -> bytes:
    damage = bytearray(content)
    for _ in range(source.choice([1, 1, 1, 3, 20])):
        at = source.randrange(len(damage) or 1)
        kind = source.randrange(5)
        if kind == 0:
            damage[at : at + 1] = bytes([source.randrange(256)])
        elif kind == 1:
            damage[at : at + 1] = bytes([damage[at] ^ 1 << source.randrange(8)])
        elif kind == 2:
            del damage[at : at + source.randrange(1, 9)]
        elif kind == 3:
            damage[at:at] = source.randbytes(source.randrange(1, 9))
        else:
            damage[at : at + 8] = source.choice([b"\xff", b"\0", b"\x7f"]) * 8
        damage = damage or bytearray(b"\n")
    return bytes(damage)


@pytest.mark.parametrize("trials", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", *COLUMNS, "a.txt.gz"])
def test_random_damage_is_reported_and_raises_nothing(tmp_path, name, trials):
    source = random.Random(trials)
    records = [(f"id {n}", "ab 猫\n" * n) for n in range(8)]
    content = encode_records(name, records)
    whole = read_file(file_of(tmp_path, name, content))
    reported = 0
    for _ in range(trials):
        file = file_of(tmp_path, name, damaged(content, source))
        found = read_file(file)
        for one in good(found):
            one.text.decode()
        reported += len(good(found)) < len(found)
        if len(good(found)) == len(found) and name not in COLUMNS:
            assert found == whole, "both compressions hold a checksum"
    assert reported > trials // 3
