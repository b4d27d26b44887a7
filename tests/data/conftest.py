"""These fixtures make tiny texts and stores in temporary folders."""

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from data import excerpts
from data.config import DataConfig, Source
from data.token_files import reader as files_reader
from data.token_store import layout, local_shards, reader, writer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of 40 documents of different lengths, some empty or not ASCII."""
    root = tmp_path / "texts"
    root.mkdir()
    for index in range(40):
        text = f"document {index} " * (index % 7) + "é猫" * (index % 3)
        (root / f"{index:02}.txt").write_bytes(text.encode())
    return root


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks of 64 values and shards of 256, so that tiny stores have many."""
    for module in (layout, writer, reader, local_shards, files_reader, excerpts):
        monkeypatch.setattr(module, "CHUNK_LENGTH", 64)
    for module in (layout, writer, reader, local_shards):
        monkeypatch.setattr(module, "SHARD_LENGTH", 256)


@pytest.fixture(scope="session")
def write_ranks() -> Callable[..., dict[str, str]]:
    """Return a function that writes a rank file and returns the keys that name it.

    The file holds all single bytes and the extra tokens.
    """

    def write(path: Path, extra: tuple[bytes, ...] = (b"th", b"the", b" the")) -> dict:
        tokens = [bytes([byte]) for byte in range(256)] + list(extra)
        lines = [
            base64.b64encode(token) + b" %d\n" % rank
            for rank, token in enumerate(tokens)
        ]
        path.write_bytes(b"".join(lines))
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return {"tokenizer": str(path), "tokenizer_sha256": sha256}

    return write


@pytest.fixture(params=["memory", "offsets", "disk"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose what a split reads into memory: all, only document offsets, or nothing."""
    if request.param != "memory":
        monkeypatch.setattr(reader, "MEMORY_LIMIT_BYTES", 0)
    if request.param == "disk":
        monkeypatch.setattr(reader, "OFFSETS_LIMIT", 0)
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
