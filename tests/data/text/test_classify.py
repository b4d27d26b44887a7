"""Files of one input are texts, or they are records and files that describe them."""

import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest

from data.catalog import FORMATS
from data.config import FormatName
from data.errors import DataError
from data.text.classify import classify
from data.text.find import find_files
from data.text.records import ReadSettings
from tests.data.text.written_files import encode_table

LINES = b'{"text": "a"}\n{"text": "b"}\n'
ARRAY = b'[{"text": "a"},\n{"text": "b"}]'
CSV = b"id,text\n1,a\n"
TABLE = encode_table("a.parquet", pa.table({"text": ["a"]}))


def write(folder: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def names_read(*inputs: str, **settings) -> list[str]:
    files = find_files(inputs, "**/*")
    return [
        file.name for file in classify(files, ReadSettings(**settings), FORMATS).files
    ]


RECORDS = [
    {"b.jsonl": LINES},
    {"b.json": ARRAY},
    {"b.csv": CSV},
    {"part-0": LINES, "part-1": LINES},
    {"b.parquet": TABLE},
    {"sub/b.tsv": CSV.replace(b",", b"\t")},
    {"x.txt": LINES},
]


@pytest.mark.parametrize("records", RECORDS)
@pytest.mark.parametrize("texts", [["t.txt"], ["a.md", "t.txt"], ["deep/er/t"]])
def test_texts_and_records_are_an_error_that_counts_them(tmp_path, records, texts):
    folder = write(tmp_path, {name: b"some text\n" for name in texts} | records)
    with pytest.raises(DataError) as error:
        names_read(folder)
    message = str(error.value)
    assert "holds files of more than one kind" in message
    assert f"{len(texts)} of text" in message
    assert "format=text" in message
    suffixes = {Path(name).suffix for name in records}
    suffix = suffixes.pop()
    if suffix and suffix not in {Path(name).suffix for name in texts}:
        assert f"pattern='**/*{suffix}'" in message
        pattern = f"**/*{suffix}"
        files = classify(find_files([folder], pattern), ReadSettings(), FORMATS).files
        assert {file.name for file in files} == records.keys()
    assert len(names_read(folder, format=FormatName.text)) == len(texts) + len(records)


DESCRIPTIVE_FILES = [
    "README.md",
    "README",
    "readme.txt",
    "sub/README_en.md",
    "LICENSE",
    "LICENSE-MIT.txt",
    "COPYING",
    "SHA256SUMS",
    "md5sums.txt",
    "b.jsonl.sha256",
    "dataset_infos.json",
    "metadata.json",
    "_SUCCESS",
    ".gitattributes",
    ".cache/b.txt",
]


@pytest.mark.parametrize("records", RECORDS)
def test_files_that_describe_records_are_left_out(tmp_path, records, caplog):
    caplog.set_level("INFO")
    descriptions = {name: b'{"about": "the data"}\n' for name in DESCRIPTIVE_FILES}
    folder = write(
        tmp_path, descriptions | {"_SUCCESS": b"", "empty.txt": b""} | records
    )
    assert names_read(folder) == sorted(records)
    assert "left out of the records: " in caplog.text


def test_files_that_describe_texts_are_read_with_them(tmp_path):
    texts = {name: b"about\n" for name in DESCRIPTIVE_FILES if not name.startswith(".")}
    folder = write(tmp_path, texts | {"a.txt": b"a", ".hidden": b"x"})
    assert names_read(folder) == sorted([*texts, "a.txt"])
    readme_folder = write(tmp_path / "alone", {"README.md": b"about"})
    assert names_read(readme_folder) == ["README.md"]


def test_records_of_several_formats_belong_together(tmp_path):
    files = {"a.jsonl": LINES, "b.json": ARRAY, "c.csv": CSV, "d.parquet": TABLE}
    assert names_read(write(tmp_path, files)) == sorted(files)


def test_each_input_may_be_of_another_kind(tmp_path):
    texts = write(tmp_path / "texts", {"a.txt": b"a"})
    records = write(tmp_path / "records", {"b.jsonl": LINES})
    assert names_read(texts, records) == ["records/b.jsonl", "texts/a.txt"]
    assert names_read(f"{tmp_path}/*/*.txt", f"{tmp_path}/*/*.jsonl")


def test_files_that_cannot_be_read_are_counted_or_left_out(tmp_path):
    files = {f"{n}.png": b"\x89PNG\r\n\x1a\n" for n in range(3)} | {"a.zip": b"PK\3\4"}
    folder = write(tmp_path, files | {"a.txt": b"a", "b.txt": b"b"})
    with pytest.raises(DataError) as error:
        names_read(folder)
    message = str(error.value)
    assert "holds 4 such files (3 of an image, 1 of a zip archive" in message
    for supported in ("UTF-8", "JSON", "csv", ".gz", ".zst", ".parquet", ".arrow"):
        assert supported in message
    all_files = find_files([folder], "**/*")
    classified = classify(all_files, ReadSettings(), FORMATS, skip_refused=True)
    assert [file.name for file in classified.files] == ["a.txt", "b.txt"]
    assert {file.name for file in classified.refused} == files.keys()
    images = [file for file in all_files if file.name in files]
    with pytest.raises(DataError, match="on_error=skip leaves no file"):
        classify(images, ReadSettings(), FORMATS, skip_refused=True)


def test_a_missing_file_is_named(tmp_path):
    files = find_files([write(tmp_path, {"a.txt": b"a", "b.txt": b"b"})], "**/*")
    (tmp_path / "b.txt").unlink()
    with pytest.raises(DataError, match=r"b\.txt: cannot be read"):
        classify([dataclasses.replace(file) for file in files], ReadSettings(), FORMATS)
