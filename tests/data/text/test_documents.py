import gzip
import io
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import data.text.documents
import data.text.files
import data.text.streams
import data.text.tables
from data.errors import DataError
from data.text.corpus import Corpus
from data.text.documents import read
from data.text.files import SPLITS, File, Format, Unit, units_of
from data.text.records import Bad, Reading, Record
from data.token_store.encode import encode_tasks, make_tasks
from data.token_store.parts import EncodingSettings

Found = list[Record | Bad]
WITH_IDS = Reading(id_field="id")
LINES = ("a.jsonl", "a.NDJSON", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst")
COLUMNS = ("a.parquet", "stream.arrow", "file.arrow")
TEXTS = ("a.txt", "a.txt.gz", "a.md.zst", "a", "a.json")


def compress(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content, 1, mtime=0)
    if name.endswith(".zst"):
        return zstandard.ZstdCompressor(write_checksum=True).compress(content)
    return content


def encode_table(name: str, table: pa.Table) -> bytes:
    sink = io.BytesIO()
    if name.endswith(".parquet"):
        pq.write_table(table, sink, row_group_size=3)
        return sink.getvalue()
    new = pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


def encode_records(name: str, records: list[tuple[str, str]]) -> bytes:
    """A file of (id, text); of a format that has no records, the texts end to end."""
    if name in COLUMNS:
        schema = pa.schema({"n": pa.int32(), "id": pa.string(), "text": pa.string()})
        rows = [{"n": 1, "id": key, "text": text} for key, text in records]
        return encode_table(name, pa.Table.from_pylist(rows, schema))
    if name in LINES:
        rows = [json.dumps({"id": key, "n": 1, "text": text}) for key, text in records]
        return compress(name, "".join(f"{row}\n" for row in rows).encode())
    return compress(name, "".join(text for _, text in records).encode())


def file_of(folder: Path, name: str, content: bytes) -> File:
    (folder / name).write_bytes(content)
    return File(str(folder / name), name, len(content), "1")


def read_file(file: File, how: Reading = WITH_IDS) -> Found:
    return [found for unit in units_of(file) for found in read(unit, how)]


def good(found: Found) -> list[Record]:
    return [one for one in found if isinstance(one, Record)]


@pytest.mark.parametrize("name", [*LINES, *COLUMNS])
@settings(max_examples=25, deadline=None)
@given(records=st.lists(st.tuples(st.text(min_size=1), st.text()), max_size=9))
def test_records_are_read_back(name, records):
    with tempfile.TemporaryDirectory() as folder:
        file = file_of(Path(folder), name, encode_records(name, records))
        expected = [(key, text.encode(), True) for key, text in records]
        assert read_file(file) == expected
        rest = read_file(file, Reading())
        assert [one.text for one in good(rest)] == [text for _, text, _ in expected]
        assert len({one.id for one in good(rest)}) == len(rest)
        assert all(one.id.startswith(f"{name}:") for one in good(rest))


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=25, deadline=None)
@given(text=st.binary())
def test_a_text_is_read_back(name, text):
    with tempfile.TemporaryDirectory() as folder:
        file = file_of(Path(folder), name, compress(name, text))
        kept = read_file(file, Reading(keep_invalid_utf8=True))
        assert kept == [Record(name, text, True)]
        try:
            text.decode()
        except UnicodeDecodeError as error:
            bad = Bad(file, f"byte {error.start}", "not UTF-8")
            assert read_file(file) == [bad, Record(name, b"", True)]
        else:
            assert read_file(file) == kept


def test_the_suffix_says_the_format():
    formats = {name: File("", name, 0, "").format for name in (*LINES, *TEXTS)}
    assert {formats[name] for name in LINES} == {Format.lines}
    assert {formats[name] for name in TEXTS} == {Format.text}


LIMIT = 200
FAULTS = [
    (b'{"text": "a"', "no JSON: "),
    (b'{"text": "a"} {"text": "b"}', "no JSON: Extra data"),
    (b"\0\0\0\0", "no JSON: "),
    (b"[" * LIMIT * 500, "longer than max_record_bytes=200"),
    (b'{"id": 1, "text": "\xff"}', "not UTF-8"),
    (b'{"id": 1, "text": "\\ud800"}', "'text' holds half a surrogate pair"),
    (b'{"id": 1}', "no field 'text'"),
    (b'{"text": "a"}', "no field 'id'"),
    (b'{"id": 1, "text": 3}', "'text' is no text but int"),
    (b'{"id": 1, "text": ["a"]}', "'text' is no text but list"),
    (b'{"id": 1, "text": null}', "'text' is no text but null"),
    (b'{"id": [1], "text": "a"}', "'id' is no id but list"),
    (b'["a"]', "no JSON object but list"),
    (b"null", "no JSON object but NoneType"),
    (b'{"id": 1, "text": "%s"}' % (b"x" * LIMIT), "longer than max_record_bytes"),
]
ODD = [
    (b'{"id": 7, "text": "crlf"}\r', "7", "crlf"),
    (b' \t{"text": "\\u0000", "id": "nul", "x": NaN} ', "nul", "\0"),
    (b'{"id": "\\ud800", "text": "\\ud83d\\ude00"}', "?", "😀"),
    (b'{"id": "twice", "text": 1, "text": "last"}', "twice", "last"),
    (b'{"id": 1.5, "text": "ab", "x": %s1%s}' % (b"[" * 50, b"]" * 50), "1.5", "ab"),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_each_bad_line_is_reported_and_hides_no_other(tmp_path, name, end):
    content, expected = bytearray(b"\xef\xbb\xbf"), []
    file = File(str(tmp_path / name), name, 0, "")
    for (bad, reason), (fine, key, text) in zip(FAULTS, ODD * 3, strict=True):
        expected.append((key, text.encode()))
        content += fine + b"\n\n \r\n"
        expected.append((f"byte {len(content)}", reason))
        content += bad + b"\n"
    content = content[:-1] + end
    file_of(tmp_path, name, compress(name, bytes(content)))
    found = list(read(Unit(file), Reading(id_field="id", max_record_bytes=LIMIT)))
    for one, (first, second) in zip(found, expected, strict=True):
        if isinstance(one, Bad):
            assert (one.file, one.place) == (file, first)
            assert second in one.reason
        else:
            assert one == (first, second, True)


@pytest.mark.parametrize(
    "value", [b"[" * 10**5 + b"]" * 10**5, b"9" * 10**5, b"1e9999"]
)
def test_monstrous_lines_do_no_harm(tmp_path, value):
    lines = b'{"text": "a", "id": ' + value + b'}\n{"id": 2, "text": "b"}\n'
    odd, fine = read_file(file_of(tmp_path, "a.jsonl", lines))
    assert isinstance(odd, Bad) or odd.text == b"a"
    assert fine == ("2", b"b", True)


def odd_table(text: pa.Array) -> pa.Table:
    return pa.table({"id": pa.array(["x", None, "z"][: len(text)]), "text": text})


def not_utf8(kind: pa.DataType) -> pa.Array:
    base = pa.large_binary() if kind == pa.large_string() else pa.binary()
    return pa.array([b"a", b"\xff", b"c"], base).view(kind)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (pa.array(["a", None, "c"]), "'text' is no text but null"),
        (pa.array(["a", None, "c"]).dictionary_encode(), "'text' is no text but null"),
        (pa.array(["a", "b" * 201, "c"]), "201 bytes, longer than"),
        (pa.array([b"a", b"\xff", b"c"]), "not UTF-8"),
        (not_utf8(pa.string()), "not UTF-8"),
        (not_utf8(pa.large_string()), "not UTF-8"),
    ],
)
def test_each_bad_row_is_reported_and_hides_no_other(tmp_path, name, text, reason):
    file = file_of(tmp_path, name, encode_table(name, odd_table(text)))
    first, bad, last = read_file(file, Reading(id_field="id", max_record_bytes=LIMIT))
    assert (first, last) == (("x", b"a", True), ("z", b"c", True))
    assert isinstance(bad, Bad)
    assert (bad.place, bad.file) == ("row 1", file)
    assert reason in bad.reason


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_may_be_odd(tmp_path, name):
    def found(table: pa.Table, how: Reading = WITH_IDS) -> Found:
        return read_file(file_of(tmp_path, name, encode_table(name, table)), how)

    (bad,) = found(pa.table({"id": ["x"]}))
    assert isinstance(bad, Bad)
    assert bad.reason == "no column 'text'"
    numbers = found(odd_table(pa.array([1, 2])))
    assert ["no text but int" in one.reason for one in numbers] == [True] * 2  # type: ignore
    assert found(odd_table(pa.array([], pa.string()))) == []
    fallback = found(odd_table(pa.array(["a", "b"])))
    assert fallback[1] == (f"{name}:row 1", b"b", True)
    ids = pa.table(
        {"id": pa.array([b"k", b"\xff"]).view(pa.string()), "text": ["a"] * 2}
    )
    fine, bad = found(ids)
    assert fine == ("k", b"a", True)
    assert isinstance(bad, Bad)
    assert [one.id for one in good(found(pa.table({"id": [5], "text": ["a"]})))] == [
        "5"
    ]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst"])
def test_what_comes_before_damage_is_read(tmp_path, name):
    """Cut off anywhere, or overwritten from some place on."""
    source = random.Random(0)
    records = [(str(n), source.randbytes(2500).hex() + "猫") for n in range(400)]
    content = encode_records(name, records)
    how = WITH_IDS if "jsonl" in name else Reading()
    whole = read_file(file_of(tmp_path, name, content), how)
    total = sum(len(one.text) for one in good(whole))
    for trial in range(12):
        at = source.randrange(len(content) // 8, len(content))
        damaged = content[:at] + b"\xff" * (len(content) - at) * (trial % 2)
        found = read_file(file_of(tmp_path, name, damaged), how)
        texts = b"".join(one.text for one in good(found))
        assert isinstance(found[-1], Bad)
        assert "cannot be read further" in found[-1].reason
        assert [isinstance(one, Bad) for one in found].count(True) <= 2
        # The last block's worth may be missing, and what damage made of it be there.
        assert len(texts) >= total * at / len(content) - 3e5
        if trial % 2 == 0:
            texts.decode()
            assert b"".join(one.text for one in good(whole)).startswith(texts)
    with_zeros = read_file(
        file_of(tmp_path, "b.txt.gz", gzip.compress(b"a") + bytes(9))
    )
    assert with_zeros == [Record("b.txt.gz", b"a", True)]


def test_frames_follow_each_other(tmp_path):
    for name in ("a.txt.gz", "a.txt.zst"):
        content = b"".join(compress(name, b"%d " % n) for n in range(2000))
        text = b"".join(b"%d " % n for n in range(2000))
        file = file_of(tmp_path, name, content)
        assert read_file(file) == [Record(name, text, True)]
        found = read_file(file_of(tmp_path, name, content + b"no frame"))
        assert found[0] == (name, text, True)
        assert isinstance(found[1], Bad)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_bad_record_ends_the_work_by_file_and_place(tmp_path, name):
    lines = b'{"text": "a"}\n\n{"text": 1}\n'
    table = pa.table({"text": pa.array(["a", "b", None])})
    content = encode_table(name, table) if name in COLUMNS else compress(name, lines)
    file = file_of(tmp_path, name, content)
    settings = EncodingSettings("bytes", None, Reading(), 0, skip_bad=False)
    place = "row 2" if name in COLUMNS else r"line 3 \(byte 15\)"
    with pytest.raises(DataError, match=rf"{name}, {place}: 'text' is no text"):
        encode_tasks(make_tasks(units_of(file)), tmp_path, settings, 1)
    assert not list(tmp_path.glob("*part*"))


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
        read_file(File(str(tmp_path / "gone.jsonl"), "gone.jsonl", 1, ""))


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


line = st.one_of(
    st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")),
    st.builds(
        lambda text: json.dumps({"text": text}).encode(), st.text("ab猫", max_size=40)
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(line, max_size=12), st.integers(1, 60), st.integers(1, 60))
def test_units_give_each_line_once_in_order(lines, unit_bytes, limit):
    how = Reading(max_record_bytes=limit)
    with tempfile.TemporaryDirectory() as folder:
        file = file_of(Path(folder), "a.jsonl", b"\n".join(lines))
        whole = list(read(Unit(file), how))
        with mock.patch.object(data.text.files, "UNIT_BYTES", unit_bytes):
            assert len(units_of(file)) == max(1, -(-file.size // unit_bytes))
            assert read_file(file, how) == whole


@pytest.fixture(scope="module")
def unit_folder(tmp_path_factory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("units")


texts = st.one_of(st.text("ab\n猫é😀 ", max_size=150).map(str.encode), st.binary())
# Of units, and of the windows behind them, which must be smaller.
sizes = st.integers(5, 40).flatmap(
    lambda u: st.tuples(st.just(u), st.integers(4, u - 1))
)


@settings(max_examples=200, deadline=None)
@given(text=texts, size=sizes)
def test_units_of_a_text_are_the_text(unit_folder, text, size):
    valid = text.decode(errors="ignore").encode() == text
    how = Reading(keep_invalid_utf8=not valid)
    found = {}
    with (
        mock.patch.object(data.text.files, "UNIT_BYTES", size[0]),
        mock.patch.object(data.text.streams, "CUT_WINDOW", size[1]),
    ):
        for name in ("a.txt", "a.txt.gz"):
            file = file_of(unit_folder, name, compress(name, text))
            found[name] = good(read_file(file, how))
            assert b"".join(one.text for one in found[name]) == text
            ends = [one.ends for one in found[name]]
            assert ends == [False] * (len(ends) - 1) + [True]
    if valid:
        for one in found["a.txt"]:
            one.text.decode()

    plain, packed = ([one[1:] for one in records] for records in found.values())
    assert plain == packed, "compressed text must give the same tokens"


@settings(max_examples=200, deadline=None)
@given(text=texts, size=sizes, validation=st.floats(0.01, 0.99))
def test_a_single_text_is_divided_without_a_byte_in_both(
    unit_folder, text, size, validation
):
    how = Reading(keep_invalid_utf8=True)
    with (
        mock.patch.object(data.text.files, "UNIT_BYTES", size[0]),
        mock.patch.object(data.text.streams, "CUT_WINDOW", size[1]),
    ):
        pieces = []
        for name in ("a.txt", "a.txt.zst"):
            file = file_of(unit_folder, name, compress(name, text))
            try:
                units = Corpus("", (file,), validation).units()
            except DataError:
                assert len(text) * min(validation, 1 - validation) < 4
                return
            found = [
                (unit.split, one.text, one.ends)
                for unit in units
                for one in good(list(read(unit, how)))
            ]
            assert [split for split, _, ends in found if ends] == list(SPLITS)
            # A last piece may be empty: it stands for the end alone.
            pieces.append([(split, one) for split, one, _ in found if one])
    assert b"".join(one for _, one in pieces[0]) == text
    held = sum(len(one) for split, one in pieces[0] if split == "validation")
    assert abs(held - len(text) * validation) <= 4
    assert pieces[0] == pieces[1]


def test_a_broken_single_text_is_reported_wherever_it_is_divided(tmp_path):
    content = gzip.compress(random.Random(0).randbytes(3000).hex().encode(), mtime=0)
    file = file_of(tmp_path, "a.txt.gz", content[:-20])
    for validation in (0.0, 0.001, 0.1, 0.9):
        units = Corpus("", (file,), validation).units()
        found = [one for unit in units for one in read(unit, Reading())]
        assert [one.reason for one in found if isinstance(one, Bad)] == [
            "cannot be read further: the compressed file ends in the middle"
        ]
        assert sum(len(one.text) for one in good(found)) > 5000
