"""A mixture of stores gives the same batches to any number of processes."""

import dataclasses
import hashlib
import json
import shutil
from math import nan
from pathlib import Path

import numpy as np
import pytest

from data import inspect, verify
from data.batch import Batch
from data.batches import Order, validation_batches
from data.catalog import FORMATS, text_store
from data.config import (
    DataConfig,
    MixtureSource,
    Packing,
    Source,
    WeightChange,
)
from data.config_rules import data_mistakes
from data.errors import DataError
from data.excerpts import excerpts
from data.inspect import InspectConfig
from data.prepare_config import PrepareConfig
from data.sources import Sources, encoding_of, open_sets, open_sources
from data.token_store import reader
from data.token_store.build import prepare_store
from data.verify import VerifyConfig
from train.errors import WRONG_DATA

WEIGHTS = {"prose": 0.61, "code": 0.23, "lists": 0.16}
STEPS = 100
B = 8


def mixture(folder: str | Path, **changes) -> DataConfig:
    """Return a config of three stores in a folder, whose weights change at step 60."""
    sources = {
        name: MixtureSource(f"{folder}/{name}", weight)
        for name, weight in WEIGHTS.items()
    }
    config = DataConfig(
        name="mixture",
        source=Source.mixture,
        sources=sources,
        weight_changes=[WeightChange(60, {"code": 0.5, "lists": 0.5})],
        sequence_length=32,
        batch_size=B,
        packing=Packing.best_fit,
        cache_dir=f"{folder}/cache",
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    random = np.random.default_rng(0)
    for number, name in enumerate(WEIGHTS):
        texts = [
            f"{name} {index} " * int(random.integers(1, 5 + 10 * number))
            for index in range(80)
        ]
        lines = [json.dumps({"text": text, "id": text[:9]}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        input_path = f"{folder}/{name}.jsonl"
        output = f"{folder}/{name}"
        prepare_store(
            PrepareConfig(input_path, output, id_field="id", validation=0.2), FORMATS
        )
    return folder


@pytest.fixture(scope="module")
def sources(stores) -> Sources:
    return open_sources(mixture(stores), text_store)


def digest(batch: Batch) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(f) for f in batch)).hexdigest()


@pytest.fixture(scope="module")
def expected(stores, sources) -> list[str]:
    """Return the hash of each global batch."""
    order = Order(sources, mixture(stores), 7)
    hashes = [digest(order.read(step)) for step in range(STEPS)]
    assert len(set(hashes)) == STEPS
    return hashes


@pytest.mark.parametrize("first", [0, 50])
@pytest.mark.parametrize("processes", [1, 4])
def test_any_number_of_processes_sees_the_same_batches(
    stores, sources, expected, processes, first
):
    config = mixture(stores)
    shares = [
        slice(i * B // processes, (i + 1) * B // processes) for i in range(processes)
    ]
    readers = [
        Order(sources, config, 7).batches(first, lambda phase, rows=rows: rows)
        for rows in shares
    ]
    for step in range(first, STEPS):
        parts = [next(batches) for batches in readers]
        batch = Batch(*map(np.concatenate, zip(*parts, strict=True)))
        assert digest(batch) == expected[step]


def test_each_source_gives_its_share_before_and_after_a_change(stores, sources):
    order = Order(sources, mixture(stores), 7)
    source_numbers = [order.find(step, np.arange(B))[0] for step in range(STEPS)]
    halves = (
        (source_numbers[:60], [0.61, 0.23, 0.16]),
        (source_numbers[60:], [0, 0.5, 0.5]),
    )
    for batches, weights in halves:
        counts = np.bincount(np.concatenate(batches), minlength=3)
        assert np.abs(counts - np.array(weights) * len(batches) * B).max() < 1
    counts = np.bincount(np.concatenate(source_numbers), minlength=3)
    rows_and_counts = zip(order.rows.items(), counts, strict=True)
    assert order.epochs(STEPS) == {
        n: count / len(rows) for (n, rows), count in rows_and_counts
    }


@pytest.mark.parametrize("skip", [[], [2, 4], [2, 4, 6, 6]])
def test_a_limit_is_refused_at_the_step_that_would_exceed_it(stores, sources, skip):
    """Skipped batches use up a source too."""
    config = mixture(stores, skip_batches=skip, weight_changes=[])
    config.sources["prose"] = MixtureSource(f"{stores}/prose", 0.61, 1)
    order = Order(sources, config, 7)

    end = next(step for step in range(STEPS) if order.epoch_mistakes(step + 1))
    assert end > 4
    for step in range(end):
        order.find(step, np.arange(B))
    with pytest.raises(DataError, match=r"step \d+: data\.sources\.prose is used up"):
        order.find(end, np.arange(B))
    assert len([*order.batches(0, stop_step=end)]) == end
    (mistake,) = order.epoch_mistakes(end + 1)
    assert (mistake.key, mistake.value) == ("data.sources.prose.epochs", 1)
    assert "steps use prose 1." in mistake.rule


def test_weights_change_at_a_batchs_number(stores, sources, expected):
    """Skipping batches therefore moves no row of the other batches."""
    order = Order(sources, mixture(stores, skip_batches=[10, 29, 61, 61]), 7)
    assert digest(order.read(35)) == expected[55]
    assert digest(order.read(40)) == expected[60]
    assert digest(order.read(41)) == expected[62]


def test_validation_reads_every_token_and_one_batch_has_all_sources(stores, sources):
    config = mixture(stores, packing=Packing.none)
    batches = list(validation_batches(sources, config))
    num_targets = sum(int((batch.targets >= 0).sum()) for batch in batches)
    assert num_targets == sources.num_tokens("validation")
    encoding = sources.encoding
    (first,) = validation_batches(sources, config, 1)
    texts = [encoding.decode([i for i in row if i < 256]) for row in first.inputs]
    assert {name for name in WEIGHTS for text in texts if name in text} == set(WEIGHTS)


def test_excerpts_say_what_a_batch_holds(stores, sources):
    config = mixture(stores)
    order = Order(sources, config, 7)
    batch = Order(sources, config, 7).read(3)
    end_id = sources.encoding.eot_token
    end = sources.encoding.decode([end_id])
    excerpt_ids = np.full_like(batch.targets, -1)
    for excerpt in excerpts(order, 3):
        text = excerpt.text.removesuffix(end)
        ids = [*text.encode(), *[end_id] * (text != excerpt.text)]
        excerpt_ids[excerpt.row, excerpt.column :][: len(ids)] = ids
        assert text.strip() in (stores / f"{excerpt.source}.jsonl").read_text()
        assert excerpt.document.startswith(excerpt.source)
        if excerpt.first_token == 0:
            assert excerpt.text.startswith(excerpt.document[:6])
    np.testing.assert_array_equal(excerpt_ids, batch.targets)


def test_damage_stops_the_reading_and_is_named(stores, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MEMORY_LIMIT_BYTES", 0)
    file = shutil.copytree(stores / "code", tmp_path / "store") / "train/tokens/c/0"
    config = DataConfig("code", Source.tokens, f"{tmp_path}/store", batch_size=4)
    order = Order(open_sources(config, text_store), config, 0)
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    message = r"step 5, source code, reading rows \d+, .*store/train/tokens/c/0: values"
    with pytest.raises(DataError, match=rf"{message} \d+ to \d+ are missing"):
        order.read(5)


def test_tokenizers_must_agree(stores, tmp_path, write_ranks):
    ranks = write_ranks(tmp_path / "ranks")
    code = f"{stores}/code.jsonl"
    prepare_store(
        PrepareConfig(input=code, output=f"{tmp_path}/other", **ranks), FORMATS
    )
    config = mixture(stores)
    config.sources["other"] = MixtureSource(f"{tmp_path}/other")
    with pytest.raises(DataError, match="their tokenizers differ"):
        open_sources(config, text_store)
    other_config = DataConfig(source=Source.tokens, path=f"{tmp_path}/other")
    assert encoding_of(other_config).n_vocab == 260


def test_a_store_without_validation_text_is_refused(stores, tmp_path):
    code = f"{stores}/code.jsonl"
    output = f"{tmp_path}/all"
    prepare_store(PrepareConfig(input=code, output=output, validation=0), FORMATS)
    with pytest.raises(DataError, match=r"0 tokens.*data\.prepare \.\.\. validation="):
        open_sources(
            DataConfig(source=Source.tokens, path=f"{tmp_path}/all"), text_store
        )
    short = DataConfig(source=Source.text, path=f"{tmp_path}/a.txt", validation=0.01)
    (tmp_path / "a.txt").write_text("x" * 150)
    with pytest.raises(DataError, match=r"1 tokens.* data\.validation="):
        open_sources(dataclasses.replace(short, cache_dir=f"{tmp_path}/c"), text_store)


def test_sets_are_stores_or_text_with_the_tokenizer_of_the_run(stores, tmp_path):
    config = mixture(stores)
    sources = open_sources(config, text_store)
    all_sources = open_sets(sources, config, {"named": f"{stores}/code"}, text_store)
    assert {*all_sources.validation_sets(by_source=False)} == {"named"}
    sets = all_sources.validation_sets(by_source=True)
    assert {*sets} == {*WEIGHTS, "named"}
    assert sets["named"].held_out == "validation"
    assert all_sources.fingerprint == sources.fingerprint
    (tmp_path / "more.txt").write_text("a text of its own")
    more = {"more": f"{tmp_path}/more.txt"}
    with pytest.raises(DataError, match=r"more\.txt"):
        open_sets(sources, config, more, text_store)
    text = DataConfig(source=Source.text, path=f"{stores}/code.jsonl")
    text = dataclasses.replace(text, cache_dir=f"{tmp_path}/c", sequence_length=8)
    text_sets = open_sets(
        open_sources(text, text_store),
        text,
        more | {"code": f"{stores}/code"},
        text_store,
    )
    more_set = text_sets.validation_sets(by_source=True)["more"]
    assert (more_set.held_out, more_set.num_bytes("train")) == ("train", 17)
    (batch,) = validation_batches(more_set, text)
    assert (batch.targets >= 0).sum() == more_set.num_tokens("train")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sources": {}}, "sources"),
        ({"sources": {"a": MixtureSource("")}}, "sources.a.path"),
        ({"sources": {"a": MixtureSource("x", 0.0)}}, "sources"),
        ({"weight_changes": [WeightChange(0, {"code": 1})]}, "weight_changes"),
        ({"weight_changes": [WeightChange(9, {"cod": 1})]}, "weight_changes"),
        ({"weight_changes": [WeightChange(9, {"code": nan})]}, "weight_changes"),
        ({"document_mask": False}, "packing"),
        ({"document_mask": False, "document_start": True}, "document_start"),
        ({"document_mask": False, "document_start": False}, "document_start"),
        ({"path": "x"}, "path"),
    ],
)
def test_mistakes_of_a_mixture_are_listed(changes, field):
    valid_config = mixture("stores")
    assert not [*data_mistakes(valid_config)]
    mistakes = data_mistakes(mixture("stores", **changes))
    assert f"data.{field}" in [mistake.key for mistake in mistakes]


def test_a_store_is_shown_and_verified(stores, tmp_path, capsys):
    """data.inspect shows a store, and data.verify reports its damage."""
    store = f"{stores}/prose"
    assert inspect.main(InspectConfig(store, samples=2)) == 0
    assert "documents by length in tokens" in capsys.readouterr().out
    small = InspectConfig(store, step=2, sequence_length=16, batch_size=2)
    assert inspect.main(small) == 0
    assert "prose" in capsys.readouterr().out.splitlines()[1]
    (mistake,) = inspect.inspect_mistakes(InspectConfig())
    assert mistake.key == "store"
    assert verify.main(VerifyConfig(f"{stores}/code")) == 0
    assert "as they were written" in capsys.readouterr().out
    shutil.copytree(f"{stores}/code", tmp_path / "damaged")
    file = tmp_path / "damaged/train/ids/c/0"
    content = bytearray(file.read_bytes())
    content[20] ^= 4
    file.write_bytes(content)
    assert verify.main(VerifyConfig(f"{tmp_path}/damaged")) == WRONG_DATA
    assert "train/ids/c/0: values 0 to" in capsys.readouterr().out


def test_a_missing_path_is_reported_with_its_key(stores, tmp_path):
    path = f"{tmp_path}/gone"
    text_config = DataConfig(source=Source.text, path=path, cache_dir=f"{tmp_path}/c")
    with pytest.raises(DataError, match=rf"^data\.path = {path}\n    there is no"):
        open_sources(text_config, text_store)
    with pytest.raises(DataError, match=rf"^data\.path = {path}\n    .*data\.prepare"):
        encoding_of(dataclasses.replace(text_config, source=Source.tokens))
    config = mixture(stores)
    sets = {"own": path}
    for table in ("eval.sets", "sets"):
        with pytest.raises(DataError, match=rf"^{table}\.own\.path = {path}\n"):
            open_sets(
                open_sources(config, text_store), config, sets, text_store, table=table
            )
    config.sources["other"] = MixtureSource(path)
    with pytest.raises(DataError, match=rf"^data\.sources\.other\.path = {path}\n"):
        open_sources(config, text_store)
