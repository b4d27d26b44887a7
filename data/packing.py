"""Pack whole documents into rows of T positions by best fit.

A document of n tokens has n - 1 pairs of an input and a target. If it has more than T
pairs, it is cut into pieces, and neighbouring pieces share a token, so that each pair
is trained on exactly once. The rows are a function of the lengths alone. Their order,
and the order of pieces within a row, has no meaning: shuffle the rows.

Rows with the same lengths are handled as one group, after Krell et al., Efficient
Sequence Packing without Cross-contamination, arXiv:2107.02027. The work grows with the
number of different lengths; single pieces are only sorted and assigned.
"""

from bisect import bisect_left, insort

import numpy as np

from data.batch import group_members

MAX_WINDOW = 2**23  # The number of pieces packed at a time, which bounds the memory.
_Contents = tuple[tuple[int, int], ...]  # (length, number of pieces) of one row


def pieces(offsets: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most T pairs; only the last may have fewer.

    `offsets` are int64 [documents + 1], the start of each document, and the end. A
    document of fewer than two tokens has no pair and gives no piece.

    Returns:
        int64 [pieces], the start of each piece, in the order of the text.
        int32 [pieces], the number of its pairs. A piece of m pairs uses m + 1 tokens.
    """
    num_pairs = np.maximum(np.diff(offsets) - 1, 0)
    document, nth = group_members(-(-num_pairs // T))
    starts = offsets[document] + nth * T
    lengths = np.minimum(T, num_pairs[document] - nth * T)
    return starts.astype(np.int64), lengths.astype(np.int32)


def pack(lengths: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign pieces to rows of at most T positions by best fit, longest piece first.

    Each piece is in exactly one row. The number of rows is the same as if each piece
    in turn went into the fullest row that has room for it. MAX_WINDOW pieces are packed
    at a time. `lengths` are integers [pieces], from 1 to T.

    Returns:
        int64 [pieces], the numbers of the pieces, row after row.
        int64 [rows + 1], the start of each row among them, and the end.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= T
    order, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for first in range(0, len(lengths), MAX_WINDOW):
        window = lengths[first : first + MAX_WINDOW]
        # NumPy sorts 16-bit integers by radix, several times as fast as wider ones.
        by_length = np.argsort(window.astype(np.min_scalar_type(T)), kind="stable")
        histogram = np.bincount(window)
        used = np.cumsum(histogram) - histogram
        for contents, num_rows in _group_rows(histogram, T):
            columns = []
            for length, times in contents:
                end = used[length] + num_rows * times
                columns.append(by_length[used[length] : end].reshape(num_rows, times))
                used[length] = end
            row_pieces = np.concatenate(columns, axis=1)
            order.append(first + row_pieces.ravel())
            sizes.append(np.full(num_rows, row_pieces.shape[1]))
    row_offsets = np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int64)
    return np.concatenate(order), row_offsets


def _group_rows(histogram: np.ndarray, T: int) -> list[tuple[_Contents, int]]:
    """Pack `histogram[n]` pieces of each length n; return contents and their rows."""
    groups: dict[int, list[tuple[_Contents, int]]] = {}  # keyed by free positions
    rooms: list[int] = []  # the keys of groups, ascending
    for length in np.flatnonzero(histogram)[::-1].tolist():
        remaining = int(histogram[length])
        changed: list[tuple[int, _Contents, int]] = []
        index = first = bisect_left(rooms, length)
        while remaining:
            if index < len(rooms):
                room, pending = rooms[index], groups[rooms[index]]
            else:  # Begin new rows, because no row has room.
                num_rows = -(-remaining // (T // length))
                empty: list[tuple[_Contents, int]] = [((), num_rows)]
                room, pending = T, empty
            # A row that got a piece now has the least room: fill it before others.
            max_pieces = room // length
            while remaining and pending:
                contents, num_rows = pending.pop()
                full_rows = min(num_rows, remaining // max_pieces)
                last = remaining - full_rows * max_pieces if full_rows < num_rows else 0
                remaining -= full_rows * max_pieces + last
                for rows, times in ((full_rows, max_pieces), (int(last > 0), last)):
                    if rows:
                        new_contents = (*contents, (length, times))
                        changed.append((room - times * length, new_contents, rows))
                if unchanged := num_rows - full_rows - (last > 0):
                    pending.append((contents, unchanged))
            index += index < len(rooms) and not pending
        for room in rooms[first:index]:
            del groups[room]
        del rooms[first:index]
        for room, contents, num_rows in changed:
            if room not in groups:
                insort(rooms, room)
            groups.setdefault(room, []).append((contents, num_rows))
    return [group for room in rooms for group in groups[room]]
