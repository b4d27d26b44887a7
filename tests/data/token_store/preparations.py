"""These functions make records, prepare them, and read or check the result.

A test module assigns the fixtures that it needs to its own names, because other modules
of its folder use the `config` of tests/data/conftest.py.
"""

import dataclasses
import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.catalog import FORMATS
from data.errors import DataError
from data.excerpts import document_id
from data.prepare_config import PrepareConfig
from data.splits import SPLITS
from data.text import files
from data.token_store import encode
from data.token_store.build import prepare_store
from data.token_store.store import Store


def write_lines(path: Path, texts: list[str]) -> None:
    lines = [json.dumps({"text": text, "n": n}) for n, text in enumerate(texts)]
    path.write_text("".join(f"{line}\n" for line in lines))


def some_texts(count: int, seed: int = 0) -> list[str]:
    source = random.Random(seed)
    return [source.randbytes(source.randrange(90)).hex() + "猫\n" for _ in range(count)]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Return a folder of records in three formats, some with empty texts."""
    folder = tmp_path / "records"
    (folder / "sub").mkdir(parents=True)
    write_lines(folder / "a.jsonl", ["", *some_texts(300), ""])
    write_lines(folder / "sub/b.jsonl", ["", ""])
    content = (folder / "a.jsonl").read_bytes()
    (folder / "sub/c.jsonl.gz").write_bytes(gzip.compress(content))
    pq.write_table(pa.table({"text": some_texts(100, 1)}), folder / "d.parquet")
    return folder


@pytest.fixture
def config(records: Path, tmp_path: Path) -> PrepareConfig:
    output = str(tmp_path / "store")
    return PrepareConfig(str(records), output, validation=0.1, workers=1)


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tasks of a few hundred bytes, so that this process sends many to workers."""
    monkeypatch.setattr(encode, "_TASK_BYTES", 1000)
    monkeypatch.setattr(files, "UNIT_BYTES", 700)


def content_of(folder: Path | str) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def documents_of(store: Store) -> dict[str, bytes]:
    documents = {}
    for split in SPLITS:
        tokens = store.split(split)
        for number, (start, end) in enumerate(
            zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)
        ):
            ids = tokens.read(start, end)
            assert ids[-1] == store.encoding.eot_token
            name = document_id(tokens, number)
            assert (split, name) not in documents
            documents[split, name] = store.encoding.decode_bytes(ids[:-1].tolist())
    return documents


def refuse(config: PrepareConfig, message: str, **changes: object) -> None:
    with pytest.raises(DataError, match=message):
        prepare_store(dataclasses.replace(config, **changes), FORMATS)  # type: ignore
