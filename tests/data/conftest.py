"""Tiny texts and stores in temporary folders."""

from pathlib import Path

import pytest

from data.config import DataConfig, Source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 40 documents of unlike lengths, some empty, some not UTF-8."""
    root = tmp_path / "texts"
    root.mkdir()
    for index in range(40):
        text = f"document {index} ".encode() * (index % 7) + b"\xff\xc3" * (index % 3)
        (root / f"{index:02}.txt").write_bytes(text)
    return root


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
