import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import packing
from data.packing import cut_documents, pack

LENGTHS = st.integers(1, 24).flatmap(
    lambda T: st.tuples(st.lists(st.integers(1, T), max_size=120), st.just(T))
)


def offsets_of(documents) -> np.ndarray:
    return np.cumsum([0, *documents], dtype=np.int64)


def assert_packed(lengths, order, row_offsets, T: int) -> None:
    """Check that each piece is in exactly one row, and each row holds 1 to T tokens."""
    assert (order.dtype, row_offsets.dtype) == (np.int64, np.int64)
    np.testing.assert_array_equal(np.sort(order), np.arange(len(lengths)))
    assert (row_offsets[0], row_offsets[-1]) == (0, len(lengths))
    if len(lengths):
        assert (np.diff(row_offsets) > 0).all()
        assert np.add.reduceat(lengths[order], row_offsets[:-1]).max() <= T


def totals_of_best_fit(lengths, T: int) -> list[int]:
    """Put each piece, the longest first, into the fullest row that has room for it.

    Return the sorted totals of the rows.
    """
    totals: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [total for total in totals if total + length <= T]
        if fitting:
            totals.remove(max(fitting))
        totals.append(max(fitting, default=0) + length)
    return sorted(totals)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 16))
@pytest.mark.parametrize("first_target", [0, 1])
def test_every_target_of_every_document_is_in_one_row_once(first_target, documents, T):
    offsets = offsets_of(documents)
    starts, lengths, is_start = cut_documents(offsets, T, first_target)
    assert (starts.dtype, lengths.dtype) == (np.int64, np.int32)
    order, row_offsets = pack(lengths, T)
    assert_packed(lengths, order, row_offsets, T)
    targets = [
        start + position
        for start, length in zip(starts[order], lengths[order], strict=True)
        for position in range(length)
    ]
    first_tokens = set(offsets[:-1][np.diff(offsets) > 0].tolist())
    excluded_tokens = first_tokens if first_target else set()
    assert sorted(targets) == [
        t for t in range(offsets[-1]) if t not in excluded_tokens
    ]
    assert {*starts[is_start].tolist()} == first_tokens - excluded_tokens


def test_a_document_is_cut_only_where_it_must_be():
    offsets = offsets_of([9, 1, 0, 5, 2, 10])
    starts, lengths, is_start = cut_documents(offsets, 4, 0)
    assert starts.tolist() == [0, 4, 8, 9, 10, 14, 15, 17, 21, 25]
    assert lengths.tolist() == [4, 4, 1, 1, 4, 1, 2, 4, 4, 2]
    assert np.flatnonzero(is_start).tolist() == [0, 3, 4, 6, 7]
    starts, lengths, is_start = cut_documents(offsets, 4, 1)
    assert starts.tolist() == [1, 5, 11, 16, 18, 22, 26]
    assert lengths.tolist() == [4, 4, 4, 1, 4, 4, 1]
    assert not is_start.any()


@settings(max_examples=500, deadline=None)
@given(LENGTHS)
def test_the_rows_are_those_of_best_fit_piece_by_piece(lengths_and_T):
    lengths = np.array(lengths_and_T[0], np.int32)
    T = lengths_and_T[1]
    order, row_offsets = pack(lengths, T)
    assert_packed(lengths, order, row_offsets, T)
    rows = np.split(lengths[order], row_offsets[1:-1])
    totals = sorted(int(row.sum()) for row in rows if len(row))
    assert totals == totals_of_best_fit(lengths.tolist(), T)


def test_windows_are_packed_one_by_one(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 33, 1000).astype(np.int32)
    monkeypatch.setattr(packing, "MAX_PIECES", 300)
    order, row_offsets = pack(lengths, 32)
    assert_packed(lengths, order, row_offsets, 32)
    for first in range(0, 1000, 300):
        window = np.arange(first, min(first + 300, 1000))
        np.testing.assert_array_equal(np.sort(order[window]), window)
    monkeypatch.undo()
    assert len(pack(lengths, 32)[1]) < len(row_offsets)


@pytest.mark.parametrize("documents", [[], [0], [1, 0, 1]])
def test_documents_without_a_token_pair_give_no_row(documents):
    starts, lengths, _ = cut_documents(offsets_of(documents), 8, 1)
    assert len(starts) == len(lengths) == 0
    order, row_offsets = pack(lengths, 8)
    assert_packed(lengths, order, row_offsets, 8)
    assert row_offsets.tolist() == [0]


def test_a_million_pieces_are_packed_in_groups_with_little_padding():
    """There are far more rows than groups, so a piece in a wrong row would show."""
    random = np.random.default_rng(1)
    lengths = np.minimum(random.lognormal(4, 1, 10**6).astype(np.int32) + 1, 512)
    order, row_offsets = pack(lengths, 512)
    assert_packed(lengths, order, row_offsets, 512)
    assert lengths.sum() > 0.999 * 512 * (len(row_offsets) - 1)


def test_a_new_plan_is_the_one_that_existing_runs_trained_on():
    lengths = (np.arange(10_000) * 7919 % 97 + 1).astype(np.int32)
    plan = b"".join(array.tobytes() for array in pack(lengths, 128))
    assert hashlib.sha256(plan).hexdigest()[:16] == "149526f12238f1c1"
