"""Each row of a table of text is a document, and a broken row hides no other."""

import csv
import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.text.delimited import CSV
from data.text.records import BadRecord, ReadSettings
from tests.data.text.written_files import (
    compress,
    good,
    read_file,
    write_file,
)

NAMES = ("a.csv", "a.tsv", "a.csv.gz", "a.CSV.zst".lower())
cells = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(cells.filter(len), cells), max_size=9))
def test_rows_are_read_back(name, delimiter, rows):
    sink = io.StringIO(newline="")
    writer = csv.writer(sink, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writerow(["n", "text", "id"])
    writer.writerows([(n, text, key) for n, (key, text) in enumerate(rows)])
    with tempfile.TemporaryDirectory() as folder:
        content = compress(name, sink.getvalue().encode())
        file = write_file(Path(folder), name, content)
        assert file.format == CSV
        expected = [(key, text.encode(), True) for key, text in rows]
        assert read_file(file) == expected
        unnamed = good(read_file(file, ReadSettings()))
        assert [record.text for record in unnamed] == [text for _, text, _ in expected]
        assert len({record.id for record in unnamed}) == len(rows)


FAULTS = [
    (b"2,x,y,z\n", "4 fields, but the first line names 3 columns"),
    (b"2,x\n", "2 fields, but the first line names 3 columns"),
    (b'2,"x" y,z\n', "no row of a table"),
    (b"2,\xff,z\n", "not UTF-8"),
    (b"2," + b"x" * 300 + b",z\n", "no row of a table"),
    (b"2," + b"x" * 150 + b",z\n", "longer than max_record_bytes"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_broken_row_is_reported_and_hides_no_other(tmp_path, fault, reason, end):
    content = b"\xef\xbb\xbfid,text,n\n1,a,b\n\n" + fault + b'3,"c\nd",e\n'
    file = write_file(tmp_path, "a.csv", content.replace(b"\n", end))
    limits = ReadSettings(id_field="id", max_record_bytes=100)
    first, bad, last = read_file(file, limits)
    assert first == ("1", b"a", True)
    assert last == ("3", b"c" + end + b"d", True)
    assert isinstance(bad, BadRecord)
    assert reason in bad.reason


def test_a_table_without_the_column_or_without_rows(tmp_path):
    for content in (b"id,content\n1,a\n", b"a b c\n", b"\n1,2\n", b'"text"x,id\n'):
        (bad,) = read_file(write_file(tmp_path, "a.csv", content))
        assert isinstance(bad, BadRecord)
        assert "no column" in bad.reason
    assert read_file(write_file(tmp_path, "a.csv", b"")) == []
    assert read_file(write_file(tmp_path, "a.csv", b"id,text\n")) == []


def test_text_before_damage_is_read(tmp_path):
    rows = [f"{n},text {n * 7919}\n" for n in range(3000)]
    content = compress("a.csv.gz", ("id,text\n" + "".join(rows)).encode())
    file = write_file(tmp_path, "a.csv.gz", content[: len(content) // 2])
    *records, bad = read_file(file)
    assert isinstance(bad, BadRecord)
    assert "cannot be read further" in bad.reason
    assert len(records) > 900
    for n, record in enumerate(good(records)):
        assert record == (str(n), f"text {n * 7919}".encode(), True)
