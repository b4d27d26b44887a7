"""Only the data files of a folder that the library datasets wrote are read.

The small files have the names and contents that datasets 5.2 gives them.
"""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from data.catalog import FORMATS
from data.errors import DataError
from data.text.classify import classify
from data.text.documents import read_documents
from data.text.files import units_of
from data.text.find import find_files
from data.text.records import ReadSettings
from tests.data.text.written_files import encode_table, good


def write_table(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_table("stream.arrow", pa.table({"text": [*texts]})))


def save(folder: Path, *texts: str, **state) -> None:
    """Write the files of `Dataset.save_to_disk`, with one data file for each text."""
    names = [f"data-{n:05}-of-{len(texts):05}.arrow" for n in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        write_table(folder / name, text)
    content = {"_data_files": [{"filename": name} for name in names], "_split": None}
    content |= {"_fingerprint": "ae0c365b634f89e4", **state}
    (folder / "state.json").write_text(json.dumps(content))
    (folder / "dataset_info.json").write_text('{"citation": "", "features": {}}')


def save_splits(folder: Path, *splits: str) -> None:
    for split in splits:
        save(folder / split, f"text of {split}")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))


def texts_in(entry: Path | str, pattern: str = "**/*") -> list[str]:
    settings = ReadSettings()
    files = classify(find_files([str(entry)], pattern), settings, FORMATS).files
    units = [unit for file in files for unit in units_of(file)]
    records = [list(read_documents(unit, settings)) for unit in units]
    return [record.text.decode() for items in records for record in good(items)]


CACHES = [
    "cache-f105b2b14e998a4a.arrow",
    "cache-7c0ff8783e6dd689_00000_of_00002.arrow",
    "tmp1a2b3c4d",
    "indices.arrow",
    "data-00000-of-00009.arrow",
]


@pytest.mark.parametrize("place", ["", "de", "corpora/de"])
def test_results_of_map_are_no_data(tmp_path, place, caplog):
    caplog.set_level("INFO")
    folder = tmp_path / place
    save(folder, "one", "two", "three")
    for name in CACHES:
        write_table(folder / name, "one, as map has changed it")
    assert texts_in(tmp_path) == ["one", "two", "three"]
    assert texts_in(tmp_path, "**/*.arrow") == ["one", "two", "three"]
    assert texts_in(f"{folder}/*.arrow") == ["one", "two", "three"]
    assert "7 files that the library datasets wrote next to its data" in caplog.text
    assert texts_in(folder / CACHES[0]) == ["one, as map has changed it"]


def test_results_of_map_next_to_a_cache_of_load_dataset_are_no_data(tmp_path):
    write_table(tmp_path / "json-train.arrow", "one")
    write_table(tmp_path / CACHES[0], "changed")
    info = {"splits": {"train": {"name": "train"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    assert texts_in(tmp_path) == ["one"]
    (tmp_path / "dataset_info.json").unlink()
    assert texts_in(tmp_path) == ["one"]
    (tmp_path / "json-train.arrow").unlink()
    assert texts_in(tmp_path) == ["changed"]


@pytest.mark.parametrize("splits", [("train", "test"), ("a", "b", "c"), ("x-1", "y")])
@pytest.mark.parametrize("place", ["", "corpora/de"])
def test_several_splits_are_an_error_that_says_how_to_name_each(
    tmp_path, splits, place
):
    folder = tmp_path / place
    save_splits(folder, *splits)
    for entry in (tmp_path, f"{folder}/*/*.arrow", f"{folder}/*"):
        if str(entry).endswith("/*") or "*" not in str(entry):
            entry = tmp_path
        with pytest.raises(DataError, match=rf"holds {len(splits)} splits") as error:
            texts_in(entry)
        for split in splits:
            assert f"{split}: {folder / split}" in str(error.value)
    for split in splits:
        assert texts_in(folder / split) == [f"text of {split}"]


def test_a_single_split_is_read_without_unlisted_folders(tmp_path):
    save_splits(tmp_path, "train")
    save(tmp_path / "left_over", "of an earlier save")
    assert texts_in(tmp_path) == ["text of train"]
    assert texts_in(tmp_path / "left_over") == ["of an earlier save"]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["json-train.arrow", "json-test.arrow"], ["test", "train"]),
        (
            ["c4-train-00000-of-00002.arrow", "c4-train-00001-of-00002.arrow"],
            ["train"],
        ),
        (
            ["c4-train-00000-of-00001.arrow", "c4-validation.arrow"],
            ["train", "validation"],
        ),
    ],
)
def test_splits_of_a_cache_of_load_dataset(tmp_path, names, splits):
    for name in names:
        write_table(tmp_path / name, name)
    info = {"splits": {split: {} for split in ("train", "test", "validation")}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    if len(splits) == 1:
        assert texts_in(tmp_path) == sorted(names)
        return
    with pytest.raises(DataError, match="holds 2 splits") as error:
        texts_in(tmp_path)
    for split in splits:
        assert f"{split}: '{tmp_path}/*-{split}*.arrow'" in str(error.value)
        expected = [name for name in names if split in name]
        assert texts_in(f"{tmp_path}/*-{split}*.arrow") == expected


@pytest.mark.parametrize("end", ["parquet", "jsonl", "jsonl.gz", "arrow"])
@pytest.mark.parametrize("place", ["data", "en"])
def test_splits_of_a_published_folder(tmp_path, place, end):
    for split in ("train", "test"):
        for n in range(2):
            path = tmp_path / place / f"{split}-{n:05}-of-00002.{end}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"")
    with pytest.raises(DataError, match="holds 2 splits of one data set"):
        find_files([str(tmp_path)], "**/*")
    train = find_files([f"{tmp_path}/{place}/train-*"], "**/*")
    assert [file.name for file in train] == [
        f"train-{n:05}-of-00002.{end}" for n in range(2)
    ]


def test_damaged_and_missing_files_are_named(tmp_path):
    save(tmp_path / "short", "one", "two")
    (tmp_path / "short/data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"names the file data-00001-of-00002\.arrow"):
        texts_in(tmp_path / "short")
    for key in ("_indices_data_files", "_indices_files"):
        save(tmp_path / key, "one", **{key: [{"filename": "indices.arrow"}]})
        with pytest.raises(DataError, match="flatten_indices"):
            texts_in(tmp_path / key)
    for number, files in enumerate([3, [3], [{"name": "x"}], {"filename": 1}, None]):
        folder = tmp_path / f"damaged-{number}"
        save(folder, "one", _data_files=files)
        with pytest.raises(DataError, match=r"state\.json: is damaged"):
            texts_in(folder)


def test_files_of_these_names_elsewhere_are_ordinary_text(tmp_path):
    for name in ("state.json", "dataset_dict.json", "dataset_info.json"):
        (tmp_path / name).write_text('{"splits": ["a", "b"], "on": true}')
    (tmp_path / "a.txt").write_text("a")
    assert len(texts_in(tmp_path)) == 4
    shutil.rmtree(tmp_path)
    save(tmp_path / "data", "one")
    (tmp_path / "README.md").write_text("about")
    assert texts_in(tmp_path) == ["one"]
