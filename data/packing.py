"""Pack whole documents into rows of T positions by best fit.

Each token of a document is the target of a pair. The first token is left out if no
beginning token precedes it. If a document has more than T pairs, it is cut into pieces,
so that each pair is trained on exactly once. The rows depend on the documents' lengths
alone. Their order is not random, so callers must shuffle the rows for training.

Rows that hold pieces of the same lengths are handled as one group, after Krell et al.,
Efficient Sequence Packing without Cross-contamination, arXiv:2107.02027. The search for
free rows takes time that grows with the number of different lengths, not of pieces.
"""

from bisect import bisect_left, insort

import numpy as np

from data.batch import expand_groups

MAX_PIECES = 2**23  # The number of pieces packed at a time bounds the memory.
_Contents = tuple[tuple[int, int], ...]  # (length, number of pieces) of one row


def cut_documents(
    offsets: np.ndarray, T: int, first_target: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut each document into pieces of T pairs; its last piece may have fewer.

    Args:
        offsets: int64 [documents + 1], the start of each document, and then the end of
            the text.
        T: the maximum number of pairs in a piece.
        first_target: the index in a document of its first target: 0 if a beginning
            token precedes the document, otherwise 1.

    Returns:
        int64 [pieces], the index of each piece's first target, in the order of the
            text.
        int32 [pieces], the number of its pairs.
        bool [pieces], whether its first target is the first token of a document.
    """
    num_pairs = np.maximum(np.diff(offsets) - first_target, 0)
    document, piece_index = expand_groups(-(-num_pairs // T))
    starts = offsets[document] + piece_index * T + first_target
    lengths = np.minimum(T, num_pairs[document] - piece_index * T)
    is_start = (piece_index == 0) & (first_target == 0)
    return starts.astype(np.int64), lengths.astype(np.int32), is_start


def pack(lengths: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign pieces to rows of at most T positions by best fit, longest piece first.

    Each piece is in exactly one row. The number of rows is the same as if each piece
    in turn went into the fullest row that has room for it. More than MAX_PIECES pieces
    are packed in several parts. `lengths` are integers [pieces], from 1 to T.

    Returns:
        int64 [pieces], the numbers of the pieces, row after row.
        int64 [rows + 1], the start of each row in that array, and then its end.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= T
    order = [np.zeros(0, np.int64)]
    sizes = [np.zeros(0, np.int64)]
    for chunk_start in range(0, len(lengths), MAX_PIECES):
        chunk = lengths[chunk_start : chunk_start + MAX_PIECES]
        # NumPy uses radix sort for 16-bit integers, which is several times as fast.
        by_length = np.argsort(chunk.astype(np.min_scalar_type(T)), kind="stable")
        histogram = np.bincount(chunk)
        starts = np.cumsum(histogram) - histogram
        for contents, num_rows in _group_rows(histogram, T):
            columns = []
            for length, count in contents:
                stop = starts[length] + num_rows * count
                columns.append(
                    by_length[starts[length] : stop].reshape(num_rows, count)
                )
                starts[length] = stop
            row_pieces = np.concatenate(columns, axis=1)
            order.append(chunk_start + row_pieces.ravel())
            sizes.append(np.full(num_rows, row_pieces.shape[1]))
    row_offsets = np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int64)
    return np.concatenate(order), row_offsets


def _group_rows(histogram: np.ndarray, T: int) -> list[tuple[_Contents, int]]:
    """Pack histogram[n] pieces of each length n; return (contents, rows) by group."""
    groups: dict[int, list[tuple[_Contents, int]]] = {}  # keys: free positions
    rooms: list[int] = []  # the keys of `groups`, ascending
    for length in np.flatnonzero(histogram)[::-1].tolist():
        remaining = int(histogram[length])
        changed: list[tuple[int, _Contents, int]] = []
        index = first_index = bisect_left(rooms, length)
        while remaining:
            if index < len(rooms):
                room = rooms[index]
                row_groups = groups[rooms[index]]
            else:  # Begin new rows, because no row has room.
                num_rows = -(-remaining // (T // length))
                empty: list[tuple[_Contents, int]] = [((), num_rows)]
                room = T
                row_groups = empty
            # Best fit: fill up one row before the next; it then has the least room.
            max_pieces = room // length
            while remaining and row_groups:
                contents, num_rows = row_groups.pop()
                full_rows = min(num_rows, remaining // max_pieces)
                extra = (
                    remaining - full_rows * max_pieces if full_rows < num_rows else 0
                )
                remaining -= full_rows * max_pieces + extra
                for rows, count in ((full_rows, max_pieces), (int(extra > 0), extra)):
                    if rows:
                        new_contents = (*contents, (length, count))
                        changed.append((room - count * length, new_contents, rows))
                if unchanged := num_rows - full_rows - (extra > 0):
                    row_groups.append((contents, unchanged))
            index += index < len(rooms) and not row_groups
        for room in rooms[first_index:index]:
            del groups[room]
        del rooms[first_index:index]
        for room, contents, num_rows in changed:
            if room not in groups:
                insort(rooms, room)
            groups.setdefault(room, []).append((contents, num_rows))
    return [group for room in rooms for group in groups[room]]
