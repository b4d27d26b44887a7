"""A shard of another store is never accepted."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.catalog import text_store
from data.config import DataConfig
from data.errors import DataError
from data.token_store.store import Store, open_store


@pytest.fixture
def twins(config: DataConfig, tmp_path: Path, small_chunks: None) -> tuple[Path, Path]:
    """Return two stores whose arrays have the same lengths, but not the same text."""
    texts = Path(config.path or "")
    for file in texts.iterdir():
        file.write_text(f"{file.name} " * 20)
    first = text_store(config).path
    *_, shorter, longer = sorted(texts.iterdir())
    for file in texts.iterdir():
        file.write_text(f"{file.name} ".upper() * 20)
    shorter.write_text(f"{shorter.name} " * 19)
    longer.write_text(f"{longer.name} " * 21)
    return Path(first), Path(text_store(config).path)


def everything(store: Store, local: bool = True) -> bytes:
    """Read all tokens and documents, in stretches as a run reads them."""
    tokens = store.split("train")
    if not local:
        tokens._local.clear()
    starts = np.arange(0, len(tokens) - 16, 16)
    rows = tokens.gather(starts, np.full(len(starts), 17))
    _, offsets = tokens.starts_within(starts[:1], starts[-1:])
    return np.concatenate([*rows, offsets]).tobytes()


@pytest.mark.parametrize("local", [True, False])
def test_a_replaced_shard_is_found_when_it_is_read(
    twins: tuple[Path, Path], kept: str, local: bool
):
    """Its checksums are right. It is read to memory, from files, or by TensorStore."""
    path, other_path = twins
    intact = everything(open_store(path))
    assert intact != everything(open_store(other_path))
    for array in ("tokens", "offsets"):
        shard = path / f"train/{array}/c/0"
        content = shard.read_bytes()
        shutil.copy(other_path / shard.relative_to(path), shard)
        with pytest.raises(DataError, match=rf"train/{array}.*values"):
            everything(open_store(path), local)
        shard.write_bytes(content)
    assert everything(open_store(path), local) == intact


def test_a_store_without_the_checksums_of_an_array_is_refused(config: DataConfig):
    path = Path(text_store(config).path)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["train/tokens.crc32c"]
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    (path / "manifest.json.sha256").write_text(digest)
    rule = r"manifest\.json: does not list train/tokens\.crc32c, .* prepare it again"
    with pytest.raises(DataError, match=rule):
        open_store(path)
