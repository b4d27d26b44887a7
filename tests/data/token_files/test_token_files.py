"""Token files of other trainers give the rows of a store of the same tokens."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from data.batches import Order, validation_batches
from data.catalog import text_store
from data.config import (
    DataConfig,
    MixtureSource,
    Packing,
    Source,
    TokenFormat,
    WeightChange,
)
from data.errors import DataError
from data.excerpts import document_id, excerpts
from data.inspect import InspectConfig, main
from data.sources import open_sets, open_sources
from data.splits import SPLITS
from data.token_files import seal
from data.token_store.store import Store, open_store
from tests.data.token_files.writers import (
    WRITERS,
    documents,
    tokens_of,
    write_llmc,
    write_megatron,
    write_nanogpt,
    write_store_of,
)


def config_of(source: str, path: Path, **keys: object) -> DataConfig:
    values = {"sequence_length": 24, "batch_size": 4, "validation": 0.2, **keys}
    cache = str(path.parent / "cache")
    return DataConfig(
        name=path.stem, source=Source(source), path=str(path), cache_dir=cache, **values
    )


def assert_same_rows(first: DataConfig, second: DataConfig) -> None:
    sources = [open_sources(config, text_store) for config in (first, second)]
    assert sources[0].fingerprint == sources[1].fingerprint
    for split in ("train", "validation"):
        assert sources[0].num_tokens(split) == sources[1].num_tokens(split)
        assert sources[0].num_bytes(split) == sources[1].num_bytes(split)
        assert sources[0].text(split) == sources[1].text(split)
    configs = zip(sources, (first, second), strict=True)
    orders = [Order(s, config, 7) for s, config in configs]
    for step in range(6):
        for a, b in zip(orders[0].read(step), orders[1].read(step), strict=True):
            np.testing.assert_array_equal(a, b)
        texts = [[e.text for e in excerpts(order, step)] for order in orders]
        assert texts[0] == texts[1]
    batches = [validation_batches(sources[i], (first, second)[i]) for i in (0, 1)]
    for a, b in zip(*batches, strict=True):
        np.testing.assert_array_equal(a.targets, b.targets)


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize(("source", "write"), WRITERS)
def test_rows_are_those_of_a_store_of_the_same_tokens(
    source, write, packing, tmp_path, kept, small_chunks, monkeypatch
):
    """Documents cross the blocks in which the files are sealed."""
    monkeypatch.setattr(seal, "_BLOCK_TOKENS", 100)
    texts = documents()
    web = tmp_path / "web.bin"
    path = write(web, tokens_of(texts))
    config = config_of(source, path, packing=packing)
    store = config_of("tokens", write_store_of(web, texts), packing=packing)
    assert_same_rows(config, store)


def test_shards_are_read_as_one_text(tmp_path, kept, small_chunks):
    """A document may begin in one shard and end in the next one."""
    texts = documents()
    tokens = np.concatenate(tokens_of(texts))
    whole = write_nanogpt(tmp_path / "whole.bin", [tokens])
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, part in enumerate(np.array_split(tokens, 5)):
        write_llmc(folder / f"web_{number:03}.bin", [part])
    by_folder = config_of("llmc", folder)
    by_pattern = config_of("llmc", folder / "web_*.bin")
    assert_same_rows(by_folder, by_pattern)
    counts = []
    for config in (by_folder, config_of("nanogpt", whole)):
        manifest = open_sources(config, text_store).stores[config.name].manifest
        splits = manifest["splits"].values()
        counts.append([sum(s[n] for s in splits) for n in ("documents", "tokens")])
    assert counts[0] == counts[1] == [len(texts), len(tokens)]


def test_signed_and_wide_tokens_of_megatron_are_read(tmp_path):
    texts = documents()
    plain = write_megatron(tmp_path / "plain.bin", tokens_of(texts))
    for dtype in ("<i4", "<i8"):
        folder = tmp_path / dtype.strip("<")
        folder.mkdir()
        prefix = write_megatron(folder / "plain.bin", tokens_of(texts), dtype)
        assert_same_rows(config_of("megatron", prefix), config_of("megatron", plain))


def test_a_single_document_holds_out_its_end(tmp_path):
    path = write_nanogpt(tmp_path / "play.bin", [np.arange(1000) % 250])
    config = config_of("nanogpt", path)
    store = text_store(config)
    assert store.split("train").read(0, 800).tolist() == [n % 250 for n in range(800)]
    assert store.num_tokens("validation") == 200
    assert document_id(store.split("validation"), 0) == "play.bin:800"


def test_another_end_token_ends_documents(tmp_path):
    path = write_nanogpt(tmp_path / "web.bin", [np.array([1, 2, 9, 3, 9, 4] * 50)])
    config = config_of("nanogpt", path, end_token=9)
    splits = text_store(config).manifest["splits"]
    assert sum(split["documents"] for split in splits.values()) == 101
    wrong = dataclasses.replace(config, end_token=257)
    with pytest.raises(DataError, match=r"end_token=257 is no id .* 257 ids"):
        text_store(wrong)


def test_files_are_mixed_with_a_store_and_evaluated_by_source(tmp_path):
    texts = documents()
    prefix = write_megatron(tmp_path / "a_b.bin", tokens_of(texts))
    store = write_store_of(tmp_path / "web.bin", texts)
    sources = {
        "old": MixtureSource(str(prefix), 1.0, format=TokenFormat.megatron),
        "web": MixtureSource(str(store), 3.0),
    }
    config = DataConfig(
        source=Source.mixture,
        sources=sources,
        weight_changes=[WeightChange(2, {"old": 1.0})],
        cache_dir=str(tmp_path / "cache"),
        sequence_length=24,
        batch_size=4,
    )
    opened = open_sources(config, text_store)
    assert [*opened.validation_sets(by_source=True)] == ["old", "web"]
    order = Order(opened, config, 0)
    assert {e.source for e in excerpts(order, 0)} == {"old", "web"}
    assert {e.source for e in excerpts(order, 2)} == {"old"}
    other = write_megatron(tmp_path / "set.bin", tokens_of(texts[:9]))
    single = config_of("megatron", prefix)
    with_set = open_sets(
        open_sources(single, text_store), single, {"set": str(other)}, text_store
    )
    assert with_set.sets["set"].num_tokens("train") == sum(
        map(len, tokens_of(texts[:9]))
    )


def test_a_file_is_sealed_once_and_shown(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level("INFO")
    path = write_nanogpt(tmp_path / "web.bin", tokens_of(documents()))
    for _ in range(2):
        assert main(InspectConfig(str(path), TokenFormat.nanogpt)) == 0
        assert "web.bin:" in capsys.readouterr().out
    assert caplog.text.count("preparing") == 1
    config = InspectConfig(str(path), TokenFormat.nanogpt, step=0, batch_size=2)
    assert main(config) == 0
    assert "web.bin:" in capsys.readouterr().out
    (sealed,) = (tmp_path / "cache/longhaul/stores").iterdir()
    assert not list(sealed.glob("*/tokens"))
    with pytest.raises(DataError, match=r"checksums of .*web.bin. Name these files"):
        read_whole(open_store(sealed))


def read_whole(store: Store) -> None:
    for split in SPLITS:
        tokens = store.split(split)
        tokens.read(0, len(tokens))


@pytest.mark.parametrize("source", ["megatron", "nanogpt", "llmc"])
def test_bytes_that_change_after_the_seal_are_refused(
    source, tmp_path, kept, small_chunks
):
    """Size and time are as before; only the checksum tells."""
    write = dict(WRITERS[:3])[source]
    path = write(tmp_path / "web.bin", tokens_of(documents()))
    config = config_of(source, path)
    fingerprint = text_store(config).fingerprint
    file = tmp_path / "web.bin"
    status = file.stat()
    content = bytearray(file.read_bytes())
    content[-10] ^= 1  # a low byte
    file.write_bytes(content)
    newer = text_store(config)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    store = text_store(config)
    assert newer.fingerprint != fingerprint == store.fingerprint
    with pytest.raises(DataError, match=r"web.bin, token \d+: .* not those of the"):
        read_whole(store)
    opened = text_store(config)
    os.truncate(file, 500)
    with pytest.raises(DataError, match=r"web.bin: ends before byte"):
        read_whole(opened)


def patched(content: bytes, start: int, new: bytes) -> bytes:
    return content[:start] + new + content[start + len(new) :]


DAMAGES = {
    "a truncated index": ("megatron", "web.idx", lambda c: c[:-8], "need 1,"),
    "another index": ("megatron", "web.idx", lambda c: b"x" + c[1:], "with MMIDIDX"),
    "half a header": ("megatron", "web.idx", lambda c: c[:20], "is truncated"),
    "a newer version": (
        "megatron",
        "web.idx",
        lambda c: patched(c, 9, b"\2"),
        "version 2, but this program reads version 1",
    ),
    "floats": (
        "megatron",
        "web.idx",
        lambda c: patched(c, 17, b"\7"),
        "dtype code 7",
    ),
    "a negative length": (
        "megatron",
        "web.idx",
        lambda c: patched(c, 34, b"\xff\xff\xff\xff"),
        "sequence 0 has a negative length",
    ),
    "a gap": (
        "megatron",
        "web.idx",
        lambda c: patched(c, 34 + 4 * 80 + 8, b"\1"),
        "sequence 1 does not begin where",
    ),
    "bounds out of order": (
        "megatron",
        "web.idx",
        lambda c: patched(c, len(c) - 8, b"\0"),
        "do not ascend from 0 to 80",
    ),
    "a truncated pair": ("megatron", "web.bin", lambda c: c[:-2], "does not belong to"),
    "an odd size": ("nanogpt", "web.bin", lambda c: c[:-1], "take 2 each"),
    "an empty file": ("nanogpt", "web.bin", lambda c: b"", "has 0 bytes"),
    "an unknown id": (
        "nanogpt",
        "web.bin",
        lambda c: patched(c, 2000, b"\1\1"),
        "token 1000 is 257, which is no id of the tokenizer bytes",
    ),
    "no header": ("llmc", "web.bin", lambda c: c[1024:], "begins with the number"),
    "a short header": ("llmc", "web.bin", lambda c: c[:100], "is shorter than"),
    "a truncated shard": ("llmc", "web.bin", lambda c: c[:-2], "announces"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_one_sentence(damage, tmp_path):
    source, name, edit, rule = DAMAGES[damage]
    path = dict(WRITERS[:3])[source](tmp_path / "web.bin", tokens_of(documents()))
    file = tmp_path / name
    file.write_bytes(edit(file.read_bytes()))
    with pytest.raises(DataError) as caught:
        open_sources(config_of(source, path), text_store)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert rule in lines[1]
    assert lines[0] == f"data.path = {path}"


@pytest.mark.parametrize(
    ("source", "name", "rule"),
    [
        ("megatron", "web.idx", "No such file"),
        ("megatron", "web.bin", "web.bin: cannot be read"),
        ("nanogpt", "web.bin", "cannot be read"),
    ],
)
def test_a_missing_file_is_named(source, name, rule, tmp_path):
    path = dict(WRITERS)[source](tmp_path / "web.bin", tokens_of(documents()))
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=rule):
        text_store(config_of(source, path))
    with pytest.raises(DataError, match="only local and mounted files"):
        text_store(dataclasses.replace(config_of(source, path), path="gs://b/web"))
