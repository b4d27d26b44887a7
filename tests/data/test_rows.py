"""Each pair of an input and its target is in exactly one row, and in its document."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import Packing
from data.rows import Batch, Concatenated, Packed, Piece, Rows, _plan
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
        _plan(tokens, length, kind, Path(folder) / "plan")
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
