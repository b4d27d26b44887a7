"""The picture of a plan: `plan.html`, one file that needs no network.

Memory against what there is, one layer on the clock, where arrays lie, and what the
step computes and sends; each figure with how it is known.
"""

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import jax
from etils import epath

from train import lanes, layout_grid, memory_bar
from train.execution import Execution
from train.hlo import Module
from train.layer_timeline import layer_timelines
from train.ledger import Ledger, Room
from train.page import figures, page, write_page
from train.program import Program
from train.progress import format_bytes, format_count
from train.rates import Rates, stated_rates
from train.schema import to_yaml
from train.targets import Target
from train.traffic import Total

_PARTS = (memory_bar, lanes, layout_grid)


def write_picture(
    path: epath.Path | Path,
    program: Program,
    ledger: Ledger,
    room: Room,
    executed: Execution | None,
    module: Module | None,
    target: Target | None,
    rows: Sequence[tuple[str, str]] = (),
    command: Sequence[str] = (),
    rates: Rates | None = None,
) -> None:
    """Write the picture of a plan atomically.

    Args:
        path: of the HTML file, local or remote.
        program: on the devices in question.
        ledger: of its memory.
        room: of a device.
        executed: what its step does; None: that is not known.
        module: the compiled step; None: nothing was compiled.
        target: the machine; None: this one.
        rows: further figures: name, and value with how it is known.
        command: the arguments that make this plan.
        rates: of a device; default: what its vendor states.
    """
    count = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))
    machine = target.name if target else "this machine"
    title = f"Plan: {format_count(count)} parameters on {machine}"
    body = [
        f"<h1>{escape(title)}</h1>",
        _command(command),
        _figures(program, ledger, room, target),
        _rows(rows),
        memory_bar.memory_section(ledger, room),
        _timelines(program, module, target, rates),
        layout_grid.layout_section(program),
        _computes(executed),
        _config(program),
    ]
    text = page(
        title,
        "\n".join(filter(None, body)),
        light="\n".join(part.LIGHT for part in _PARTS),
        dark="\n".join(part.DARK for part in _PARTS),
        style="\n".join([_STYLE, *(part.STYLE for part in _PARTS)]),
        js=lanes.SCRIPT + layout_grid.SCRIPT,
    )
    write_page(path, text)


def _command(arguments: Sequence[str]) -> str:
    if not arguments:
        return ""
    line = shlex.join(["python", "-m", "train.plan", *arguments])
    return f'<pre class="command">{escape(line)}</pre>'


def _figures(
    program: Program, ledger: Ledger, room: Room, target: Target | None
) -> str:
    answer = {True: "yes", False: "no", None: "not known"}[ledger.fits(room)]
    note, needed = "not compiled", ledger.needed
    if needed:
        spare = room.available - needed.bytes
        amount = format_bytes(abs(spare))
        note = f"{amount} {'to spare' if spare >= 0 else 'too much'}, {needed.how}"
    sizes = [f"{name} {size}" for name, size in program.mesh.shape.items() if size > 1]
    rows, length = program.config.data.batch_size, program.config.data.sequence_length
    flops = format_count(program.flops_per_step)
    return figures(
        [
            ("Fits", answer, escape(note)),
            ("Devices", f"{program.mesh.size:,}", escape(_machine(program, target))),
            ("Mesh", " x ".join(sizes) or "one device", "computed"),
            ("Tokens a step", f"{program.tokens_per_step:,}", f"{rows:,} x {length:,}"),
            ("Model FLOPs a step", flops, "computed: 6 N + 12 L C T a token"),
        ]
    )


def _machine(program: Program, target: Target | None) -> str:
    devices = program.mesh.devices.flat
    hosts = len({device.process_index for device in devices})
    counted = [f"{hosts:,} hosts"] if hosts > 1 else []
    if target and target.platform == "tpu" and target.slices > 1:
        counted.append(f"{target.slices:,} slices")
    return ", ".join([devices[0].device_kind, *counted])


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    table = _table([], rows, num_texts=2)
    return f"<section><h2>Prediction</h2>{table}</section>" if rows else ""


def _timelines(
    program: Program, module: Module | None, target: Target | None, rates: Rates | None
) -> str:
    heading = "<h2>One layer on the clock</h2>"
    if module is None:
        why = "Nothing was compiled, so there is no schedule to show."
    elif target is None and rates is None:
        why = "What this machine's devices do in a second is not known."
    else:
        assert target or rates
        try:
            rates = rates or stated_rates(target.chip)  # type: ignore[union-attr]
            timelines = layer_timelines(module, program.mesh, rates)
        except ValueError as error:
            why = f"Not drawn: {error}."
        else:
            if timelines:
                return (
                    f"<section>{heading}<p>{_MODEL}</p>"
                    f"{lanes.timeline_figures(timelines)}</section>"
                )
            why = "The compiled step has no loop over layers."
    return f'<section>{heading}<p class="hint">{escape(why)}</p></section>'


def _computes(executed: Execution | None) -> str:
    if executed is None:
        return (
            "<section><h2>What a step computes and sends</h2>"
            '<p class="hint">Not known: nothing was compiled.</p></section>'
        )
    work, how = executed.work, executed.how
    rows = [
        ("Model FLOPs", f"{format_count(executed.model_flops)}FLOPs", "computed"),
        ("Executed", f"{format_count(work.flops)}FLOPs", how),
        ("Executed over model", f"{work.flops / executed.model_flops:.2f}", how),
        ("of these products", f"{format_count(work.products)}FLOPs", how),
        (
            "of these attention, but for the blocks it skips",
            f"{format_count(work.attention)}FLOPs",
            how,
        ),
        ("To and from memory, at most", format_bytes(work.memory_bytes), how),
    ]
    rows += [("Kernels without a count", name, how) for name in work.unknown]
    if executed.unread:
        rows.append(("Lines of the program not read", f"{len(executed.unread):,}", how))
    outside = [[total.serves, *_total(total)] for total in executed.outside_layers]
    headers = ["Axes", "Network", "Kind", "Times", "Payload", "Sent", "Beside products"]
    return (
        "<section><h2>What a device computes in a step</h2>"
        f"{_table(['', 'Figure', 'Known by'], rows)}</section>"
        "<section><h2>What a device sends in a step</h2>"
        '<p class="hint">Bytes sent assume rings. Beside products: the share that is '
        f"scheduled so that products can hide it. All {escape(how)}.</p>"
        f"{_table(headers, map(_total, executed.sent), 3)}</section>"
        "<section><h2>Of these outside the layers</h2>"
        f"{_table(['For', *headers], outside, 4)}</section>"
    )


def _total(total: Total) -> Sequence[str]:
    return [
        " ".join(total.axes) or "none",
        total.network,
        total.kind,
        f"{total.count:,}",
        format_bytes(total.payload),
        format_bytes(total.sent),
        f"{total.overlapped:.0%}",
    ]


def _table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], num_texts: int = 1
) -> str:
    """Return a table whose first columns are text, the others figures."""

    def row(tag: str, cells: Sequence[str]) -> str:
        starts = [f'<{tag} class="text">'] * num_texts + [f"<{tag}>"] * len(cells)
        pairs = zip(starts, cells, strict=False)
        return f"<tr>{''.join(f'{a}{escape(c)}</{tag}>' for a, c in pairs)}</tr>"

    head = row("th", headers) if headers else ""
    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="scroll"><table>{head}{body}</table></div>'


def _config(program: Program) -> str:
    text = escape(to_yaml(program.config))
    return f"<details><summary>Config</summary><pre>{text}</pre></details>"


_MODEL = (
    "One trip of the compiled step's loop over layers, in XLA's order, at the rates "
    "that vendors state: the shortest times that this schedule allows. Hover or tap "
    "for names, bytes and FLOPs."
)
_STYLE = """.command { margin: -8px 0 24px; white-space: pre-wrap;
  overflow-wrap: anywhere; color: var(--soft); }
.figures { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.figures dd { font-size: 18px; white-space: normal; overflow-wrap: anywhere; }
th.text, td.text { text-align: left; }
p { max-width: 75ch; }
@media (max-width: 700px) { th, td { font-size: 12px; padding: 4px 0 4px 8px; }
  td.text { white-space: normal; } }
"""
