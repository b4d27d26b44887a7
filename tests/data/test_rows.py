"""Each token is a target in exactly one row, after the token before it."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Batch, Piece
from data.catalog import text_store
from data.config import Packing
from data.errors import DataError
from data.packed_rows import Packed, make_plan
from data.rows import Concatenated, Rows, open_rows
from data.sources import open_sources
from data.token_store.reader import TokenArray

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
BEGINNING = 10**6
quietly = settings(database=None, deadline=None, max_examples=100)


def numbered_tokens(document_lengths: list[int]) -> TokenArray:
    """Return documents whose tokens are their positions from 1 on (0 is padding)."""
    tokens = object.__new__(TokenArray)
    offsets = np.concatenate([[0], np.cumsum(document_lengths)]).astype(np.int64)
    tokens._num_tokens = int(offsets[-1])
    tokens.in_memory = True
    tokens._offsets_in_memory = True
    tokens._local = {}
    numbers = np.arange(1, offsets[-1] + 1)
    tokens._arrays = {"tokens": numbers, "offsets": offsets}
    tokens.__dict__["offsets"] = offsets
    return tokens


def rows_of(
    tokens: TokenArray, kind: Packing, length: int, beginning: int | None
) -> Rows:
    if kind is Packing.concat:
        return Concatenated(tokens, length, True, True, beginning)
    plan = make_plan(tokens.offsets, length, kind, int(beginning is None))
    return Packed(tokens, length, plan, beginning)


@pytest.mark.parametrize("kind", list(Packing))
@given(document_lengths=lengths, length=st.integers(1, 24))
@quietly
def test_every_token_is_learned_once_after_the_one_before_it(
    kind, document_lengths, length
):
    """The first token of a document follows the beginning token.

    All tokens of a segment are of one document.
    """
    tokens = numbered_tokens(document_lengths)
    rows = rows_of(tokens, kind, length, BEGINNING)
    batch = rows.read(np.arange(len(rows)))
    is_target = batch.targets >= 0
    inputs = batch.inputs[is_target]
    targets = batch.targets[is_target]
    np.testing.assert_array_equal(np.sort(targets), np.arange(1, len(tokens) + 1))
    is_first = np.isin(targets - 1, tokens.offsets)
    np.testing.assert_array_equal(inputs, np.where(is_first, BEGINNING, targets - 1))
    assert not np.isin(batch.inputs[~is_target], BEGINNING).any()
    assert_segments_are_of_documents(batch, tokens)
    for number in range(len(rows)):
        pieces = rows.pieces(number)
        assert_pieces_describe_row(pieces, batch.targets[number], -1)
        assert kind is not Packing.none or len(pieces) == 1


@pytest.mark.parametrize("kind", list(Packing))
@given(document_lengths=lengths, length=st.integers(1, 24))
@quietly
def test_without_beginning_tokens_every_pair_inside_a_document_is_learned_once(
    kind, document_lengths, length
):
    tokens = numbered_tokens(document_lengths)
    rows = rows_of(tokens, kind, length, None)
    if not len(rows):
        assert sum(document_lengths) == 1 or max(document_lengths) == 1
        return
    batch = rows.read(np.arange(len(rows)))
    is_target = batch.targets >= 0
    np.testing.assert_array_equal(batch.inputs[is_target] + 1, batch.targets[is_target])
    ends = np.cumsum(document_lengths)
    pairs = np.setdiff1d(np.arange(1, ends[-1]), ends)
    np.testing.assert_array_equal(np.sort(batch.inputs[is_target]), pairs)
    assert_segments_are_of_documents(batch, tokens)
    for number in range(len(rows)):
        pieces = rows.pieces(number)
        assert_pieces_describe_row(pieces, batch.inputs[number], 0)
        assert kind is not Packing.none or len(pieces) == 1


def assert_segments_are_of_documents(batch: Batch, tokens: TokenArray) -> None:
    assert (batch.segment_ids.max(axis=1) >= 1).all()
    for inputs, targets, segments, positions in zip(*batch, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            columns = np.flatnonzero(segments == segment)
            np.testing.assert_array_equal(
                columns, np.arange(columns[0], columns[-1] + 1)
            )
            np.testing.assert_array_equal(positions[columns], np.arange(len(columns)))
            np.testing.assert_array_equal(inputs[columns][1:], targets[columns][:-1])
            ids = np.concatenate([inputs[columns], targets[columns]])
            ids = ids[(ids >= 0) & (ids != BEGINNING)]
            documents = np.searchsorted(tokens.offsets, ids - 1, "right")
            assert len(set(documents.tolist())) == 1
        padding = segments == 0
        assert not inputs[padding].any()
        assert not positions[padding].any()
        assert (targets[padding] == -1).all()


def assert_pieces_describe_row(
    pieces: list[Piece], row: np.ndarray, padding: int
) -> None:
    rebuilt_row = np.full_like(row, padding)
    for piece in pieces:
        rebuilt_row[piece.column :][: piece.length] = (
            piece.start + 1 + np.arange(piece.length)
        )
    np.testing.assert_array_equal(rebuilt_row, row)


@pytest.fixture
def planned(config):
    """Return a function that opens the training rows, and the file of their plan."""
    config = dataclasses.replace(config, packing=Packing.best_fit)
    sources = open_sources(config, text_store)
    (store,) = sources.stores.values()

    def rows() -> Rows:
        return open_rows(store, config, "train", sources.cache)

    rows()
    (file,) = sources.cache.glob("*-train-best_fit-*")
    return rows, file


def all_fields(rows: Rows) -> list[bytes]:
    return [field.tobytes() for field in rows.read(np.arange(len(rows)))]


def test_a_damaged_plan_is_made_again(planned, caplog):
    """The damage is a flipped bit, or a missing end. An intact plan is read again."""
    rows, file = planned
    content = file.read_bytes()
    status = file.stat()
    expected = all_fields(rows())
    later_status = file.stat()
    # A plan that is written again is a new file, even if its bytes are the same.
    assert later_status.st_mtime_ns == status.st_mtime_ns
    assert later_status.st_ino == status.st_ino
    assert not caplog.text
    source = random.Random(0)
    num_reported = 0
    for _ in range(200):
        damaged = bytearray(content)
        damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
        file.write_bytes(damaged)
        caplog.clear()
        assert all_fields(rows()) == expected
        num_reported += "this plan of rows is damaged" in caplog.text
    assert num_reported > 150, "the others are in times and other notes of a zip file"
    for size in (0, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        caplog.clear()
        assert all_fields(rows()) == expected
        assert f"{file}: this plan of rows is damaged" in caplog.text
    assert [*file.parent.glob("*best_fit*")] == [file]


def test_rows_that_are_open_outlive_their_plan(planned):
    rows, file = planned
    earlier_rows = rows()
    expected = all_fields(rows())
    file.unlink()
    assert all_fields(earlier_rows) == all_fields(rows()) == expected


def test_a_plan_that_cannot_be_written_is_named(planned):
    rows, file = planned
    file.unlink()
    file.mkdir()
    with pytest.raises(DataError, match=r"cannot be written .*data\.cache_dir"):
        rows()
