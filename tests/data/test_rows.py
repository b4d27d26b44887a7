"""Each pair of an input and its target is in exactly one row, and in its document."""

import dataclasses
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data.packed_rows
import data.rows
from data.batch import Batch, Piece
from data.config import Packing
from data.errors import DataError
from data.packed_rows import Packed, write_plan
from data.rows import Concatenated, Rows, open_rows
from data.sources import open_sources
from data.token_store.reader import TokenArray

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
quietly = settings(database=None, deadline=None, max_examples=100)


def flat(document_lengths: list[int]) -> TokenArray:
    """Documents whose tokens are their own places, counted from 1 (0 is padding)."""
    tokens = object.__new__(TokenArray)
    offsets = np.concatenate([[0], np.cumsum(document_lengths)]).astype(np.int64)
    tokens._num_tokens, tokens.in_memory = int(offsets[-1]), True
    tokens._offsets_in_memory, tokens._local = True, {}
    places = np.arange(1, offsets[-1] + 1)
    tokens._arrays = {"tokens": places, "offsets": offsets}
    tokens.__dict__["offsets"] = offsets
    return tokens


def rows_of(tokens: TokenArray, kind: Packing, length: int) -> Rows:
    if kind is Packing.concat:
        count = -(-max(0, len(tokens) - 1) // length)
        return Concatenated(tokens, length, count, document_mask=True)
    with tempfile.TemporaryDirectory() as folder:
        write_plan(tokens, length, kind, Path(folder) / "plan")
        return Packed(tokens, length, Path(folder) / "plan")


@pytest.mark.parametrize("kind", list(Packing))
@given(document_lengths=lengths, length=st.integers(1, 24))
@quietly
def test_every_pair_is_learned_once_inside_its_document(kind, document_lengths, length):
    tokens = flat(document_lengths)
    rows = rows_of(tokens, kind, length)
    if not len(rows):
        assert sum(document_lengths) == 1 or max(document_lengths) == 1
        return
    batch = rows.read(np.arange(len(rows)))
    learned = batch.targets >= 0
    np.testing.assert_array_equal(batch.inputs[learned] + 1, batch.targets[learned])
    ends = np.cumsum(document_lengths)
    pairs = np.setdiff1d(np.arange(1, ends[-1]), ends)
    np.testing.assert_array_equal(np.sort(batch.inputs[learned]), pairs)
    assert_each_segment_is_a_stretch_of_a_document(batch, tokens)
    for number in range(len(rows)):
        assert_pieces_say_what_stands_there(rows.pieces(number), batch, number)
        assert kind is not Packing.none or len(rows.pieces(number)) == 1


def assert_each_segment_is_a_stretch_of_a_document(
    batch: Batch, tokens: TokenArray
) -> None:
    assert (batch.segment_ids.max(axis=1) >= 1).all()
    for inputs, _, segments, positions in zip(*batch, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            at = np.flatnonzero(segments == segment)
            np.testing.assert_array_equal(at, np.arange(at[0], at[-1] + 1))
            np.testing.assert_array_equal(positions[at], np.arange(len(at)))
            first = inputs[at[0]]
            np.testing.assert_array_equal(inputs[at], first + np.arange(len(at)))
            documents = np.searchsorted(tokens.offsets, inputs[at] - 1, "right")
            assert len(set(documents.tolist())) == 1
        padding = segments == 0
        assert not inputs[padding].any()
        assert not positions[padding].any()


def assert_pieces_say_what_stands_there(
    pieces: list[Piece], batch: Batch, number: int
) -> None:
    shown = np.zeros_like(batch.inputs[number])
    for piece in pieces:
        shown[piece.column :][: piece.length] = (
            piece.start + 1 + np.arange(piece.length)
        )
    np.testing.assert_array_equal(shown, batch.inputs[number])


@pytest.fixture(params=["read", "mapped"])
def planned(config, request, monkeypatch):
    """Open the training rows of a config, and find the folder of their plan."""
    if request.param == "mapped":
        monkeypatch.setattr(data.packed_rows, "_READ_BYTES", 0)
    config = dataclasses.replace(config, packing=Packing.best_fit)
    sources = open_sources(config)
    (store,) = sources.stores.values()

    def rows() -> Rows:
        return open_rows(store, config, "train", sources.cache)

    rows()
    (folder,) = sources.cache.glob("*-train-best_fit-*")
    return rows, folder


def everything(rows: Rows) -> list[bytes]:
    return [field.tobytes() for field in rows.read(np.arange(len(rows)))]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_flipped_bit_of_a_plan_is_found_and_the_plan_made_anew(planned, caplog):
    """Forty times, in any file: an array, its header, or the digests."""
    rows, folder = planned
    expected, files = everything(rows()), contents(folder)
    assert len(files) == 4
    assert not caplog.text
    draw = random.Random(0)
    for _ in range(40):
        name = draw.choice(sorted(files))
        damaged = bytearray(files[name])
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        (folder / name).write_bytes(damaged)
        caplog.clear()
        assert everything(rows()) == expected
        assert f"{folder}: " in caplog.text
        assert "this plan of rows is damaged" in caplog.text
        assert contents(folder) == files
        assert [file.name for file in folder.parent.glob("*best_fit*")] == [folder.name]


@pytest.mark.parametrize("damage", ["empty", "cut", "gone", "without digests"])
def test_what_a_power_failure_leaves_of_a_plan_is_made_anew(planned, damage, caplog):
    rows, folder = planned
    expected, files = everything(rows()), contents(folder)
    for name in files if damage != "without digests" else (data.packed_rows._DIGESTS,):
        if damage in ("gone", "without digests"):
            (folder / name).unlink()
        else:
            kept = len(files[name]) // 2 if damage == "cut" else 0
            (folder / name).write_bytes(files[name][:kept])
        caplog.clear()
        assert everything(rows()) == expected
        assert "is computed again" in caplog.text
        assert contents(folder) == files


def test_rows_that_are_open_outlive_their_plan(planned):
    rows, folder = planned
    opened, expected = rows(), everything(rows())
    shutil.rmtree(folder)
    assert everything(opened) == everything(rows()) == expected


def test_a_plan_that_is_damaged_each_time_ends_the_start(planned, monkeypatch):
    rows, folder = planned

    def plan_badly(*what: object) -> None:
        folder.mkdir()
        (folder / "starts.npy").touch()

    monkeypatch.setattr(data.rows, "write_plan", plan_badly)
    (folder / "starts.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"cache_dir"):
        rows()
