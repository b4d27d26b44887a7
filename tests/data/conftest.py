"""Tiny texts and stores in temporary folders."""

from pathlib import Path

import pytest

import data.token_store.reader
import data.token_store.writer
from data.config import DataConfig, Source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 40 documents of unlike lengths, some empty, some not ASCII."""
    root = tmp_path / "texts"
    root.mkdir()
    for index in range(40):
        text = f"document {index} " * (index % 7) + "é猫" * (index % 3)
        (root / f"{index:02}.txt").write_bytes(text.encode())
    return root


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 values and shards of 256, so that tiny stores have many."""
    for module in (data.token_store.writer, data.token_store.reader):
        monkeypatch.setattr(module, "CHUNK_LENGTH", 64)
        monkeypatch.setattr(module, "SHARD_LENGTH", 256)


@pytest.fixture(params=["memory", "offsets", "disk"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What of a split is read into memory: all, where documents start, or nothing."""
    if request.param != "memory":
        monkeypatch.setattr(data.token_store.reader, "MEMORY_LIMIT_BYTES", 0)
    if request.param == "disk":
        monkeypatch.setattr(data.token_store.reader, "OFFSETS_LIMIT", 0)
    return request.param


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(
        name="tiny",
        source=Source.text,
        path=str(folder),
        validation=0.25,
        sequence_length=16,
        batch_size=8,
        cache_dir=str(tmp_path / "cache"),
    )
