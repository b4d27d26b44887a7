"""What a device's memory holds, as HTML: one bar against what there is."""

from html import escape

from train.plan.memory import HELD, Figure, Ledger, Room
from train.units import format_bytes

_GRADIENTS, _TEMPORARIES, _ARGUMENTS = "gradients", "temporaries", "arguments"
_REST, _PADDING, _OTHER = "activations and buffers", "padding of these", "other"
_UNTOLD = "activations, buffers, code"  # of a program that does not fit
_NAMES = (*HELD, _PADDING, _GRADIENTS, _REST, "outputs", "code", _OTHER)

LIGHT = """--m0: #2f6fb3; --m1: #8468b0; --m2: #4aa3b5; --m3: #a3abb5; --m4: #d0762b;
  --m5: #4f9d78; --m6: #c4b46a; --m7: #b5546a; --m8: #7d8794;"""
DARK = """--m0: #5a95d0; --m1: #9a80c8; --m3: #656e7b;"""
STYLE = """.room { position: relative; margin: 30px 0 34px; }
.room .bar { height: 30px; background: var(--rule); }
.limit { position: absolute; top: -5px; bottom: -5px; width: 0;
  border-left: 2px solid var(--ink); }
.limit span { position: absolute; font-size: 12px; line-height: 1.2;
  white-space: nowrap; right: 4px; }
.limit.top span { bottom: 100%; } .limit.bottom span { top: 100%; }
.limit.start span { right: auto; left: 4px; }"""


def memory_section(ledger: Ledger, room: Room) -> str:
    """Draw what a device holds, with the limits and the verdict."""
    pieces = memory_pieces(ledger)
    used = sum(figure.bytes for figure in pieces.values())
    scale = max(room.total, used) * 1.01
    bar = "".join(
        f'<i style="flex-grow:{figure.bytes / scale:.6f};'
        f'background:var(--m{_color(n)})" '
        f'title="{escape(n)}: {format_bytes(figure.bytes)}"></i>'
        for n, figure in pieces.items()
    )
    free = f'<i style="flex-grow:{max(0.0, 1 - used / scale):.6f}"></i>'
    limits = [
        ("top", room.available, "with the margin"),
        ("bottom", room.program, "a program has"),
    ]
    if room.available == room.program:
        limits = [("bottom", room.program, "a program has, with the margin")]
    lines = "".join(
        f'<div class="limit {side}{" start" if at < scale / 3 else ""}" style="left:'
        f'{100 * at / scale:.2f}%"><span>{format_bytes(at)} {what}</span></div>'
        for side, at, what in limits
    )
    rows = "".join(
        f'<tr><td><i style="background:var(--m{_color(name)})"></i>{escape(name)}</td>'
        f"<td>{format_bytes(figure.bytes)}</td><td>{figure.bytes / room.total:.1%}</td>"
        f"<td>{escape(figure.how)}</td></tr>"
        for name, figure in pieces.items()
    ) + "".join(
        f'<tr class="hint"><td>of these: {escape(name)}</td>'
        f"<td>{format_bytes(figure.bytes)}</td><td>{figure.bytes / room.total:.1%}</td>"
        f"<td>{escape(figure.how)}</td></tr>"
        for name, figure in ledger.temporaries.items()
        if figure.bytes
    )
    return (
        f"<section><h2>Memory of a device</h2><p>{verdict(ledger, room)}</p>"
        f'<div class="room"><div class="bar">{bar}{free}</div>{lines}</div>'
        "<table><tr><th></th><th>Bytes</th><th>Share</th><th>Known by</th></tr>"
        f"{rows}</table>{_notes(ledger, room)}</section>"
    )


def memory_pieces(ledger: Ledger) -> dict[str, Figure]:
    """Cut what a device holds into pieces that add up to what it needs, by name."""
    parts = dict(ledger.parts)
    gradients = parts.pop(_GRADIENTS)
    pieces = {name: parts.pop(name) for name in HELD}
    arguments, temporaries = parts.pop(_ARGUMENTS, None), parts.pop(_TEMPORARIES, None)
    if arguments:
        padding = arguments.bytes - sum(f.bytes for f in pieces.values())
        pieces[_PADDING] = Figure(max(0, padding), arguments.how)
    if temporaries is None or gradients.bytes <= temporaries.bytes:
        pieces[_GRADIENTS] = gradients
    if temporaries:
        rest = temporaries.bytes
        rest -= gradients.bytes if _GRADIENTS in pieces else 0
        pieces[_REST] = Figure(rest, temporaries.how)
    pieces |= parts
    if ledger.needed:
        missing = ledger.needed.bytes - sum(f.bytes for f in pieces.values())
        name = _OTHER if temporaries else _UNTOLD
        pieces[name] = Figure(max(0, missing), ledger.needed.how)
    return {name: figure for name, figure in pieces.items() if figure.bytes}


def verdict(ledger: Ledger, room: Room) -> str:
    """Say in a sentence whether it fits."""
    fits, needed = ledger.fits(room), ledger.needed
    available = f"the {format_bytes(room.available)} that it may have"
    if needed is None:
        if fits is None:
            return (
                "Whether it fits is not known: nothing was compiled. State and batch "
                f"alone fit into {available}."
            )
        return f"It does not fit: state and batch alone exceed {available}."
    spare = room.available - needed.bytes
    amount = f"{format_bytes(needed.bytes)} a device"
    answer = "It fits" if fits else "It does not fit"
    than = f"{format_bytes(abs(spare))} {'less' if fits else 'more'} than {available}"
    return f"{answer}: {amount} are needed, {than}."


def _notes(ledger: Ledger, room: Room) -> str:
    gradients = ledger.parts[_GRADIENTS].bytes
    notes = [
        f"All memory is {format_bytes(room.total)}.",
        *([f"{escape(room.note)}."] if room.note else []),
        f"Gradients take {format_bytes(gradients)} if all exist at once.",
        f"A host needs {format_bytes(ledger.host_save.bytes)} at most during a save, "
        f"a checkpoint {format_bytes(ledger.checkpoint.bytes)} before compression "
        f"({ledger.checkpoint.how}).",
    ]
    return f'<p class="hint">{" ".join(notes)}</p>'


def _color(name: str) -> int:
    name = _REST if name == _UNTOLD else name
    return _NAMES.index(name) if name in _NAMES else len(_NAMES) - 1
