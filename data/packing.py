"""Whole documents packed into rows of T positions, best fit first.

A document of n tokens is n - 1 pairs of an input and its target. It is cut only if
these exceed T, and then neighbouring pieces share a token, so that each pair is
trained on exactly once. Which pieces make up a row follows from the lengths alone.
The order of the rows, and of the pieces within one, means nothing: shuffle the rows.

Rows of equal contents are handled as one group, after Krell et al., Efficient Sequence
Packing without Cross-contamination, arXiv:2107.02027: the work grows with the number
of different lengths, and pieces are touched only to be sorted and handed out.
"""

from bisect import bisect_left, insort

import numpy as np

MAX_WINDOW = 2**23  # pieces packed at a time, which bounds the memory
_Parts = tuple[tuple[int, int], ...]  # (length, how many pieces of it), of one row


def pieces(offsets: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most T pairs; all but a document's last have T.

    Args:
        offsets: int64 [documents + 1], where each document starts, then the end. A
            document of less than two tokens has no pair and gives no piece.
        T: positions in a row.

    Returns:
        int64 [pieces], where each piece starts, in the order of the text.
        int32 [pieces], its pairs: m of them use the m + 1 tokens start ... start + m.
    """
    num_pairs = np.maximum(np.diff(offsets) - 1, 0)
    num_pieces = -(-num_pairs // T)
    document = np.repeat(np.arange(len(num_pairs)), num_pieces)
    nth = np.arange(len(document)) - (np.cumsum(num_pieces) - num_pieces)[document]
    starts = offsets[document] + nth * T
    lengths = np.minimum(T, num_pairs[document] - nth * T)
    return starts.astype(np.int64), lengths.astype(np.int32)


def pack(lengths: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Put pieces into rows of at most T positions by best fit, longest piece first.

    Each piece is in exactly one row. There are as many rows as if piece after piece
    went into the fullest row that has room; MAX_WINDOW pieces are packed at a time.

    Args:
        lengths: integers [pieces], from 1 to T.
        T: positions in a row.

    Returns:
        int64 [pieces], the pieces, row after row.
        int64 [rows + 1], where each row starts among them, then the end.
    """
    assert not len(lengths) or 1 <= lengths.min() <= lengths.max() <= T
    order, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for first in range(0, len(lengths), MAX_WINDOW):
        window = lengths[first : first + MAX_WINDOW]
        # Numpy sorts integers of 16 bits by radix, several times as fast.
        by_length = np.argsort(window.astype(np.min_scalar_type(T)), kind="stable")
        histogram = np.bincount(window)
        used = np.cumsum(histogram) - histogram
        for parts, num_rows in _group_rows(histogram, T):
            columns = []
            for length, times in parts:
                end = used[length] + num_rows * times
                columns.append(by_length[used[length] : end].reshape(num_rows, times))
                used[length] = end
            row_pieces = np.concatenate(columns, axis=1)
            order.append(first + row_pieces.ravel())
            sizes.append(np.full(num_rows, row_pieces.shape[1]))
    row_offsets = np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int64)
    return np.concatenate(order), row_offsets


def fill(lengths: np.ndarray, row_offsets: np.ndarray, T: int) -> float:
    """Return the part of the rows' positions that the pieces fill; 1 of no rows."""
    num_rows = len(row_offsets) - 1
    return float(lengths.sum(dtype=np.int64)) / (num_rows * T) if num_rows else 1.0


def _group_rows(histogram: np.ndarray, T: int) -> list[tuple[_Parts, int]]:
    """Pack so many pieces of each length into groups of equal rows: (parts, rows)."""
    groups: dict[int, list[tuple[_Parts, int]]] = {}  # by the room left in a row
    rooms: list[int] = []  # the keys of groups, ascending
    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        grown: list[tuple[int, _Parts, int]] = []
        place = first = bisect_left(rooms, length)
        while left:
            if place < len(rooms):
                room, pending = rooms[place], groups[rooms[place]]
            else:  # no row is left that has room
                num_rows = -(-left // (T // length))
                empty: list[tuple[_Parts, int]] = [((), num_rows)]
                room, pending = T, empty
            # A row that got a piece has the least room of all: fill it before the next.
            most = room // length
            while left and pending:
                parts, num_rows = pending.pop()
                full = min(num_rows, left // most)
                rest = left - full * most if full < num_rows else 0
                left -= full * most + rest
                for rows, times in ((full, most), (int(rest > 0), rest)):
                    if rows:
                        added = (*parts, (length, times))
                        grown.append((room - times * length, added, rows))
                if untouched := num_rows - full - (rest > 0):
                    pending.append((parts, untouched))
            place += place < len(rooms) and not pending
        for room in rooms[first:place]:
            del groups[room]
        del rooms[first:place]
        for room, parts, num_rows in grown:
            if room not in groups:
                insort(rooms, room)
            groups.setdefault(room, []).append((parts, num_rows))
    return [group for room in rooms for group in groups[room]]
