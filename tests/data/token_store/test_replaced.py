"""A shard of another store is never taken for the store's own."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.config import DataConfig
from data.errors import DataError
from data.token_store.cached import cached_store
from data.token_store.store import Store, open_store


@pytest.fixture
def twins(config: DataConfig, tmp_path: Path, small_chunks: None) -> tuple[Path, Path]:
    """Two stores of which all arrays have the same lengths, but not the same text."""
    texts = Path(config.path or "")
    for file in texts.iterdir():
        file.write_text(f"{file.name} " * 20)
    first = cached_store(config).path
    *_, one, another = sorted(texts.iterdir())
    for file in texts.iterdir():
        file.write_text(f"{file.name} ".upper() * 20)
    one.write_text(f"{one.name} " * 19)
    another.write_text(f"{another.name} " * 21)
    return Path(first), Path(cached_store(config).path)


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
    """With its checksums all right, in memory, from files, and by TensorStore."""
    own, other = twins
    intact = everything(open_store(own))
    assert intact != everything(open_store(other))
    for array in ("tokens", "offsets"):
        shard = own / f"train/{array}/c/0"
        content = shard.read_bytes()
        shutil.copy(other / shard.relative_to(own), shard)
        with pytest.raises(DataError, match=rf"train/{array}.*values"):
            everything(open_store(own), local)
        shard.write_bytes(content)
    assert everything(open_store(own), local) == intact


def test_a_store_without_the_checksums_of_an_array_is_refused(config: DataConfig):
    path = Path(cached_store(config).path)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["train/tokens.crc32c"]
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    (path / "manifest.json.sha256").write_text(digest)
    rule = r"manifest\.json: does not list train/tokens\.crc32c, .* prepare it again"
    with pytest.raises(DataError, match=rule):
        open_store(path)
