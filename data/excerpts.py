"""The parts of documents that make up a batch, for people who look at the data."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from data.batch import Piece
from data.batches import Order
from data.encoding import decode
from data.token_store.layout import CHUNK_LENGTH
from data.token_store.reader import TokenArray


class Excerpt(NamedTuple):
    """A part of a document in a batch.

    row, column: where the part begins in the batch.
    source: the name of the document's source.
    document: the document's id.
    document_number: the document's number in the split.
    first_token: the index of the part's first token within the document.
    text: the text to which the part's targets decode, or its inputs if documents have
        no beginning token.
    """

    row: int
    column: int
    source: str
    document: str
    document_number: int
    first_token: int
    text: str


def excerpts(order: Order, step: int) -> Iterator[Excerpt]:
    """Yield the parts of documents in a step's batch, row by row."""
    phase = order.phase(step)
    source_of_row, numbers, parts = order.find(step, np.arange(phase.rows))
    names = [list(order.rows)[source] for source in source_of_row]
    found = zip(names, numbers, parts, strict=True)
    for row, (name, number, part) in enumerate(found):
        store = order.sources.stores[name]
        tokens = store.split("train")
        pieces = order.rows[name].pieces(int(number))
        for column, start, length in _cut_pieces(pieces, part, phase.length):
            document, document_start, _ = document_at(tokens, start)
            text = decode(store.encoding, tokens.read(start, start + length))
            yield Excerpt(
                row=row,
                column=column,
                source=name,
                document=document_id(tokens, document),
                document_number=document,
                first_token=start - document_start,
                text=text,
            )


def _cut_pieces(pieces: list[Piece], part: int, length: int) -> list[Piece]:
    """Return the pieces of one part of a row, with columns of the part."""
    first = part * length
    cut = list[Piece]()
    for column, start, size in pieces:
        begin = max(column, first)
        end = min(column + size, first + length)
        if begin < end:
            cut.append(Piece(begin - first, start + begin - column, end - begin))
    return cut


def document_at(tokens: TokenArray, token: int) -> tuple[int, int, int]:
    """Return the number, start and end of the document that contains a token."""
    chunk = token // CHUNK_LENGTH
    first = max(0, int(tokens.index[chunk]) - 1)
    offsets = tokens.array("offsets", first, int(tokens.index[chunk + 1]) + 1)
    index = int(np.searchsorted(offsets, token, "right")) - 1
    return first + index, int(offsets[index]), int(offsets[index + 1])


def document_id(tokens: TokenArray, number: int) -> str:
    """Read a document's id."""
    start, stop = tokens.array("id_offsets", number, number + 2).tolist()
    return tokens.array("ids", start, stop).tobytes().decode()
