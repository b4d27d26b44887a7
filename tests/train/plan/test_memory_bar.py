"""The pieces of the bar are the ledger's, and add up to what is needed."""

import dataclasses

import pytest

from train.plan.memory import COMPILED, COMPUTED, Figure, Ledger, Room
from train.plan.memory_bar import memory_pieces, memory_section, verdict

HELD = {"parameters": 100, "optimizer state": 200, "batch": 10, "gradients": 100}
GIB = 2**30
ROOM = Room(1000, 900, 800)


def ledger(needed: int | None = None, **compiled: int) -> Ledger:
    parts = {name: Figure(size, COMPUTED) for name, size in HELD.items()}
    parts |= {name: Figure(size, COMPILED) for name, size in compiled.items()}
    known = None if needed is None else Figure(needed, COMPILED)
    return Ledger(parts, known, Figure(7, COMPUTED), Figure(8, COMPUTED))


@pytest.mark.parametrize("temporaries", [50, 150])
def test_pieces_add_up_to_what_is_needed(temporaries):
    sizes = {"arguments": 320, "temporaries": temporaries, "outputs": 4, "code": 6}
    pieces = memory_pieces(ledger(sum(sizes.values()), **sizes))
    bytes_of = {name: figure.bytes for name, figure in pieces.items()}
    assert sum(bytes_of.values()) == sum(sizes.values())
    assert bytes_of["padding of these"] == 10
    # Gradients that never all exist at once are no piece of their own.
    assert bytes_of.get("gradients") == (100 if temporaries == 150 else None)
    assert bytes_of["activations and buffers"] == 50
    assert pieces["activations and buffers"].how == COMPILED


def test_what_the_compiler_refused_is_drawn_whole():
    pieces = memory_pieces(ledger(5000))
    assert sum(figure.bytes for figure in pieces.values()) == 5000
    html = memory_section(ledger(5000), ROOM)
    assert "It does not fit: 4.88 KiB a device are needed, 4.10 KiB more" in html
    assert "800 B with the margin" in html
    assert "900 B a program has" in html


@pytest.mark.parametrize(
    ("needed", "room", "says"),
    [
        (700, ROOM, "It fits: 700 B a device are needed, 100 B less than the 800 B"),
        (None, ROOM, "is not known: nothing was compiled"),
        (None, Room(300, 300, 300), "does not fit: state and batch alone exceed"),
    ],
)
def test_the_verdict_is_a_sentence(needed, room, says):
    assert says in verdict(ledger(needed), room)


def test_what_is_nothing_has_no_row_and_a_limit_has_its_reason():
    items = {"one layer": Figure(1, COMPUTED), "logits": Figure(0, COMPUTED)}
    html = memory_section(
        dataclasses.replace(ledger(700), temporaries=items),
        dataclasses.replace(ROOM, note="set A=<b>"),
    )
    assert "of these: one layer" in html
    assert "logits" not in html
    assert "set A=&lt;b&gt;." in html
