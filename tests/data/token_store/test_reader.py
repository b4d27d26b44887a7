"""A split reads the same from memory and from disk, whatever its documents are."""

import itertools
import tempfile
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import excerpts
from data.errors import DataError
from data.excerpts import document_at, document_id
from data.key_value_store import KeyValueStore
from data.splits import SPLITS
from data.token_store import layout, local_shards, reader, writer
from data.token_store.layout import ARRAYS
from data.token_store.parts import SegmentSplit, StoreSegment
from data.token_store.reader import TokenArray
from data.token_store.writer import write_store

lengths = st.lists(
    st.one_of(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40)), max_size=80
)


def segments_of(ends: np.ndarray, cuts: list[int]) -> Iterator[StoreSegment]:
    """Cut tokens 0, 1, 2 ... into segments anywhere, and documents with them."""
    edges = [0, *sorted({cut for cut in cuts if cut < ends[-1]}), int(ends[-1])]
    for index, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = (ends > low) & (ends <= high)
        names = [b"id %d" % number for number in np.flatnonzero(inside)]
        split = SegmentSplit(
            np.arange(low, high).astype(np.uint16),
            ends[inside] - low,
            np.frombuffer(b"".join(names), np.uint8),
            np.cumsum([len(name) for name in names], dtype=np.int64),
        )
        empty_split = SegmentSplit(*(part[:0] for part in split))
        notes = {"bytes": {"train": high - low}, "empty": index, "bad": []}
        yield StoreSegment(dict(zip(SPLITS, (split, empty_split), strict=True)), notes)


@settings(max_examples=40, deadline=None)
@given(
    lengths=lengths.filter(len),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    chunk=st.sampled_from([16, 32]),
    source=st.randoms(use_true_random=False),
)
def test_memory_and_disk_agree_with_the_documents(lengths, cuts, chunk, source):
    ends = np.cumsum(lengths)
    offsets = np.concatenate([[0], ends])
    total = int(ends[-1])
    small = {"CHUNK_LENGTH": chunk, "SHARD_LENGTH": 4 * chunk}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(layout, **small),
        mock.patch.multiple(writer, **small),
        mock.patch.multiple(reader, **small),
        mock.patch.object(excerpts, "CHUNK_LENGTH", chunk),
        mock.patch.multiple(local_shards, **small),
    ):
        storage = KeyValueStore(folder)
        segments = segments_of(ends, cuts)
        write_store(storage, segments, np.dtype(np.uint16), {})
        arrays = []
        for limit, offsets_limit in ((2**30, 0), (0, 2**30), (0, 0), (0, 0)):
            limits = {"MEMORY_LIMIT_BYTES": limit, "OFFSETS_LIMIT": offsets_limit}
            with mock.patch.multiple(reader, **limits):
                arrays.append(TokenArray(storage, "train", len(lengths), total))
        assert [array.in_memory for array in arrays] == [True, False, False, False]
        assert {*arrays[2]._local} >= {"tokens", "offsets"}
        arrays[3]._local = {}  # it now reads like a remote store
        assert [array.is_local for array in arrays] == [True, True, True, False]
        lows = np.array([source.randrange(total + 9) for _ in range(20)])
        highs = lows + [source.randrange(60) for _ in range(20)]
        spans = np.minimum(highs, total) - np.minimum(lows, total)
        expected = [
            (row, offset)
            for row, (low, high) in enumerate(zip(lows, highs, strict=True))
            for offset in offsets
            if low < offset <= high
        ]
        for array in arrays:
            np.testing.assert_array_equal(array.offsets, offsets)
            blocks = np.arange(-(-total // chunk) + 1) * chunk
            expected_index = np.searchsorted(offsets[:-1], blocks)
            np.testing.assert_array_equal(array.array("index"), expected_index)
            for token in source.sample(range(total), min(total, 12)):
                number, start, end = document_at(array, token)
                assert start <= token < end
                assert (start, end) == tuple(offsets[number : number + 2])
            starts = np.stack(array.starts_within(lows, highs), axis=1)
            assert starts.dtype == np.int64
            np.testing.assert_array_equal(starts, np.array(expected).reshape(-1, 2))
            for empty in array.starts_within(lows[:0], highs[:0]):
                assert (empty.shape, empty.dtype) == ((0,), np.int64)
            gathered = array.gather(np.minimum(lows, total), spans)
            flat = [np.arange(low, high) for low, high in zip(lows, highs, strict=True)]
            flat = np.concatenate(flat)
            assert len(gathered) == len(spans)
            np.testing.assert_array_equal(np.concatenate(gathered), flat[flat < total])
            assert document_id(array, len(lengths) - 1) == f"id {len(lengths) - 1}"
            tokens = np.concatenate(list(array.iterate_shards("tokens")))
            np.testing.assert_array_equal(tokens, np.arange(total))


def test_an_empty_split_can_be_read_and_a_wrong_length_is_damage(tmp_path):
    storage = KeyValueStore(tmp_path)
    segments = segments_of(np.array([5]), [])
    write_store(storage, segments, np.dtype(np.uint16), {})
    array = TokenArray(storage, "validation", 0, 0)
    assert len(array) == 0
    assert array.offsets.tolist() == [0]
    assert [len(array.array(name)) for name in ARRAYS] == [0, 1, 1, 0, 1]
    for counts in ((2, 5), (1, 6)):
        with pytest.raises(
            DataError, match=r"train/\w+: is missing .* \(its len.*Delete"
        ):
            TokenArray(storage, "train", *counts)
