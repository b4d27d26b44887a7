import dataclasses
import itertools
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import grain
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.batches import (
    Batch,
    Order,
    shuffled_rows,
    spread_rows,
    validation_batches,
)
from data.catalog import text_store
from data.config import DataConfig, FormatName, Packing, Source
from data.config_rules import data_mistakes
from data.errors import DataError
from data.excerpts import excerpts
from data.rows import make_batch
from data.sources import Sources, open_sets, open_sources
from data.token_store.store import Store
from tests.fleet import REPOSITORY
from tests.program import program_code

NO_BACKEND = """
if 'jax' in sys.modules:
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized()
"""


def only_store(sources: Sources) -> Store:
    (store,) = sources.stores.values()
    return store


def take(batches, count: int) -> list[Batch]:
    result = list(itertools.islice(batches, count))
    batches.close()
    return result


def assert_equal(actual: Batch, expected: Batch) -> None:
    for name, actual_field, expected_field in zip(
        Batch._fields, actual, expected, strict=True
    ):
        np.testing.assert_array_equal(actual_field, expected_field, err_msg=name)


def join(batches: list[Batch]) -> Batch:
    return Batch(*map(np.concatenate, zip(*batches, strict=True)))


@pytest.fixture
def numbers(tmp_path: Path) -> tuple[DataConfig, np.ndarray]:
    """Return a config of one file whose windows of 4 bytes differ, and its tokens."""
    text = b"".join(bytes(divmod(index, 100)) for index in range(1000))
    (tmp_path / "numbers").write_bytes(text)
    config = DataConfig(
        source=Source.text,
        path=str(tmp_path / "numbers"),
        format=FormatName.text,  # the file holds zero bytes
        sequence_length=16,
        batch_size=8,
        cache_dir=str(tmp_path / "cache"),
    )
    return config, np.frombuffer(text, np.uint8).astype(np.int32)


def test_a_batch_does_not_depend_on_where_reading_began(config):
    store = open_sources(config, text_store)
    (late,) = take(Order(store, config, 3).batches(10**12), 1)
    assert_equal(late, Order(store, config, 3).read(10**12))
    batches = take(Order(store, config, seed=3).batches(), 40)
    for step, batch in enumerate(take(Order(store, config, 3).batches(25), 15), 25):
        assert_equal(batch, batches[step])
        assert_equal(batch, Order(store, config, 3).read(step))
    for array in batches[0]:
        assert array.dtype == np.int32
        assert array.shape == (8, 16)


def test_two_processes_together_read_all_validation_batches(config):
    store = open_sources(config, text_store)
    half = config.batch_size // 2
    global_batches = validation_batches(store, config)
    first = validation_batches(store, config, rows=slice(half))
    second = validation_batches(store, config, rows=slice(half, None))
    for batch, *halves in zip(global_batches, first, second, strict=True):
        assert_equal(join(halves), batch)


def test_a_batch_may_be_read_in_several_slices(config):
    order = Order(open_sources(config, text_store), config, 5)
    batch = order.read(2, [slice(6, 8), slice(0, 2)])
    assert_equal(batch, Batch(*(field[[6, 7, 0, 1]] for field in order.read(2))))


def test_each_epoch_has_every_row_once_in_a_new_order(numbers):
    config, flat = numbers
    store = open_sources(config, text_store)
    (rows,) = Order(store, config, 0).rows.values()
    count = len(rows)
    assert count == 112
    flat = np.concatenate([[store.encoding.eot_token], flat])
    rows = [flat[row * 16 : row * 16 + 17].tolist() for row in range(count)]

    def order(seed: int, epoch: int) -> list[int]:
        steps = count // config.batch_size
        batch = join(take(Order(store, config, seed).batches(steps * epoch), steps))
        np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        full = np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)
        return [rows.index(row) for row in full.tolist()]

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    for permutation in orders:
        assert sorted(permutation) == list(range(count))
    assert len({tuple(permutation) for permutation in orders}) == 6, "orders repeat"
    assert list(range(count)) not in orders


@pytest.mark.parametrize("count", [1, 112, 70_000])
@pytest.mark.parametrize("seed", [7, 2**32 - 2])
def test_the_order_of_rows_matches_grain(count, seed):
    order = grain.MapDataset.range(count).shuffle(seed=seed).repeat(None)
    ranks = np.concatenate([np.arange(3 * min(count, 50)), [2 * count, 10**13]])
    numbers = shuffled_rows(ranks, count, seed)
    assert numbers.dtype == np.int64
    assert numbers.tolist() == [order[rank] for rank in ranks.tolist()]


def test_batches_straddle_epochs_without_loss(numbers):
    config, _ = numbers
    config = dataclasses.replace(config, batch_size=9)  # 9 does not divide 112
    store = open_sources(config, text_store)
    # The 25 batches are two epochs and one row.
    batch = join(take(Order(store, config, 0).batches(), 25))
    counts = np.unique(batch.inputs[:224], axis=0, return_counts=True)[1]
    assert counts.tolist() == [2] * 112


ranges = st.lists(st.integers(0, 60), max_size=8).map(
    lambda ends: sorted(ends)[: len(ends) // 2 * 2]
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(skip=ranges)
def test_steps_take_the_batches_that_are_not_skipped(config, skip):
    """Skipped batches are never read; all others are read once, in order, unchanged."""
    skipped_numbers = {
        number
        for first, last in zip(skip[::2], skip[1::2], strict=True)
        for number in range(first, last + 1)
    }
    expected = [number for number in range(100) if number not in skipped_numbers][:30]
    store = open_sources(config, text_store)
    full_order = Order(store, config, 3)
    config = dataclasses.replace(config, skip_batches=skip)
    assert not [*data_mistakes(config)]
    order = Order(store, config, 3)
    assert [order.batch_number(step) for step in range(30)] == expected
    for step, batch in enumerate(take(order.batches(27), 3), 27):
        assert_equal(batch, full_order.read(expected[step]))
        assert_equal(batch, order.read(step))
    assert list(excerpts(order, 29)) == list(excerpts(full_order, expected[29]))
    assert order.epochs(30) == full_order.epochs(expected[29] + 1)
    assert order.epochs(0) == full_order.epochs(0) == {"tiny": 0.0}


def test_rows_respect_documents():
    end = 256
    tokens = [[1, 2, end, 3, end, end, 4], [end, end, 4, 5, 6, 7, 8]]
    row = np.array([0, 0, 0, 1, 1])
    column = np.array([3, 5, 6, 1, 2])
    tokens = np.array(tokens, np.int32)
    num_remaining = np.array([13, 9])
    batch = make_batch(tokens, row, column, num_remaining, None)
    expected = Batch(
        inputs=[[1, 2, end, 3, end, end], [end, end, 4, 5, 6, 7]],
        targets=[[2, end, -1, end, -1, -1], [-1, -1, 5, 6, 7, 8]],
        segment_ids=[[1, 1, 1, 2, 2, 3], [1, 2, 3, 3, 3, 3]],
        positions=[[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]],
    )
    assert_equal(batch, expected)
    batch = make_batch(tokens, row, column, num_remaining, 300)
    expected = Batch(
        inputs=[[1, 2, 300, 3, 300, 300], [300, 300, 4, 5, 6, 7]],
        targets=[[2, end, 3, end, end, 4], [end, 4, 5, 6, 7, 8]],
        segment_ids=[[1, 1, 2, 2, 3, 4], [1, 2, 2, 2, 2, 2]],
        positions=[[0, 1, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4]],
    )
    assert_equal(batch, expected)


@pytest.mark.parametrize("rows", [1, 8])
def test_validation_reads_the_text_once(config, rows):
    config = dataclasses.replace(config, batch_size=rows)
    store = open_sources(config, text_store)
    tokens = only_store(store).split("validation")
    flat = tokens.read(0, len(tokens)).astype(np.int32)
    config = dataclasses.replace(config, document_mask=False)
    batches = list(validation_batches(store, config))
    assert {batch.inputs.shape for batch in batches} == {(rows, 16)}
    batch = join(batches)
    real = batch.segment_ids > 0
    np.testing.assert_array_equal(batch.inputs[real], flat[:-1])
    np.testing.assert_array_equal(batch.targets[real], flat[1:])
    assert (batch.targets[~real] == -1).all()
    assert (~real).any()
    assert len(list(validation_batches(store, config, 1))) == 1
    for batch, expected in zip(
        validation_batches(store, config, 1000), batches, strict=True
    ):
        assert_equal(batch, expected)


@pytest.mark.parametrize(
    "period", [1, 3, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
@pytest.mark.parametrize("packing", [Packing.concat, Packing.none])
@pytest.mark.parametrize("num_batches", [3, 10])
def test_some_batches_represent_the_whole_set(tmp_path, period, packing, num_batches):
    """Documents of two kinds follow each other in blocks, or alternate regularly.

    Each document fills a row, so that every n-th row is also every n-th document.
    """
    kinds = [b"a", b"b"] * 200 if period > 1 else [b"a"] * 300 + [b"b"] * 100
    blocks = [kinds[i // max(1, period - 1) % len(kinds)] for i in range(400)]
    kinds = blocks if period > 1 else kinds
    folder = tmp_path / "set"
    folder.mkdir()
    for number, kind in enumerate(kinds):
        (folder / f"{number:04}.txt").write_bytes(kind * 15)
    (tmp_path / "own.txt").write_text("a text to train on, and to hold some out of it")
    config = DataConfig(
        source=Source.text,
        path=f"{tmp_path}/own.txt",
        packing=packing,
        sequence_length=16,
        batch_size=4,
        cache_dir=f"{tmp_path}/c",
    )
    sources = open_sets(
        open_sources(config, text_store), config, {"set": str(folder)}, text_store
    )
    sources = sources.validation_sets(by_source=False)["set"]
    sample = join(list(validation_batches(sources, config, num_batches)))
    full_set = join(list(validation_batches(sources, config)))
    assert sample.inputs.shape == (4 * num_batches, 16)

    def share_of_a(batch: Batch) -> float:
        targets = batch.targets[(batch.targets >= 0) & (batch.segment_ids > 0)]
        return float(np.isin(targets, [ord("a")]).sum() / len(targets))

    assert share_of_a(sample) == pytest.approx(share_of_a(full_set), abs=0.2)
    second_sample = join(list(validation_batches(sources, config, num_batches)))
    assert_equal(sample, second_sample)


@pytest.mark.parametrize(
    ("num_rows", "num_chosen"),
    [(5, 5), (7, 5), (100, 1), (101, 100), (1000, 64), (10**6, 333), (3, 2)],
)
def test_each_stretch_of_rows_gives_one_row(num_rows, num_chosen):
    rows = spread_rows(num_rows, num_chosen)
    assert len({*rows.tolist()}) == num_chosen
    assert (np.diff(rows) > 0).all()
    assert 0 <= rows[0] <= rows[-1] < num_rows
    stretch = num_rows / num_chosen
    assert (np.abs(rows - np.arange(num_chosen) * stretch) <= stretch + 1).all()


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("size", [2, 7, 30])
def test_a_set_without_validation_text_is_scored_to_its_end(tmp_path, size, packing):
    """The set may be shorter than a row, or its last row may not be full."""
    (tmp_path / "own.txt").write_text("a text to train on, and to hold some out of it")
    (tmp_path / "note.txt").write_text("x" * size)
    config = DataConfig(
        source=Source.text,
        path=f"{tmp_path}/own.txt",
        packing=packing,
        sequence_length=16,
        batch_size=8,
        cache_dir=f"{tmp_path}/c",
    )
    sources = open_sets(
        open_sources(config, text_store),
        config,
        {"note": f"{tmp_path}/note.txt"},
        text_store,
    ).validation_sets(by_source=False)["note"]
    assert sources.held_out == "train"
    (batch,) = validation_batches(sources, config)
    assert (batch.targets >= 0).sum() == sources.num_tokens("train") == size


def test_too_little_text_is_refused_with_the_remedy(config):
    for changes in ({"sequence_length": 4096}, {"batch_size": 10**6}):
        changed_config = dataclasses.replace(config, **changes)
        with pytest.raises(DataError, match="shorter sequences, a smaller batch"):
            Order(
                open_sources(changed_config, text_store), changed_config, seed=0
            ).batches()


def test_an_abandoned_iterator_lets_the_process_end_and_uses_no_jax(config):
    script = (
        "import pickle, sys; from data.sources import open_sources\n"
        "from data.catalog import text_store\n"
        "from data import tokenizer\nfrom data.token_store import store\n"
        "from data.batches import Order\n"
        "config = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "kept = Order(open_sources(config, text_store), config, 0).batches()\n"
        "next(kept); print('done')\n" + NO_BACKEND
    )
    result = subprocess.run(
        [sys.executable, "-c", program_code(script), pickle.dumps(config).hex()],
        cwd=REPOSITORY,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr


def test_a_closed_iterator_leaves_no_thread(config):
    previous_threads = set(threading.enumerate())
    batches = Order(open_sources(config, text_store), config, seed=0).batches()
    next(batches)
    new_threads = set(threading.enumerate()) - previous_threads
    assert new_threads
    batches.close()
    for thread in new_threads:
        thread.join(timeout=60)
    assert not [thread for thread in new_threads if thread.is_alive()]


def test_reading_ahead_stops_at_prefetch(config, monkeypatch):
    store = open_sources(config, text_store)
    reads = []
    tokens = only_store(store).split("train")
    gather = tokens.gather
    monkeypatch.setattr(tokens, "gather", lambda *a: (reads.append(1), gather(*a))[1])
    batches = Order(store, config, seed=0).batches()
    next(batches)
    time.sleep(0.5)
    assert len(reads) == 1 + config.prefetch
    batches.close()
