"""The picture of a plan: `plan.html`, one file that needs no network.

Memory against what there is, one layer on the clock, where arrays lie, and what the
step computes and sends; each figure with how it is known.
"""

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from etils import epath

from train.cli.schema import to_yaml
from train.hardware.targets import Target
from train.plan import lanes, layout_grid, memory_bar
from train.plan.compiled.hlo import Module
from train.plan.cost import StepCost
from train.plan.execution_tables import execution_sections
from train.plan.layer_schedule import layer_timelines
from train.plan.memory import Ledger, Room
from train.plan.rates import Rates, rates_of
from train.program import Program
from train.run.html import figures, page, table, write_page
from train.units import format_bytes, format_count, format_flops

_PARTS = (memory_bar, lanes, layout_grid)


def write_picture(
    path: epath.Path | Path,
    program: Program,
    ledger: Ledger,
    room: Room,
    executed: StepCost | None,
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
        rates: of a device; default: what programs get of what its vendor states.
    """
    count = program.num_params
    machine = target.name if target else "this machine"
    title = f"Plan: {format_count(count)} parameters on {machine}"
    body = [
        f"<h1>{escape(title)}</h1>",
        _command(command),
        _figures(program, ledger, room, target),
        _rows(rows),
        memory_bar.memory_section(ledger, room),
        _clock(program, module, target, rates),
        layout_grid.layout_section(program),
        execution_sections(executed),
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
    flops = format_flops(program.flops_per_step)
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
    cells = table([], rows, num_texts=2)
    return (
        f'<section class="prose"><h2>Prediction</h2>{cells}</section>' if rows else ""
    )


def _clock(
    program: Program, module: Module | None, target: Target | None, rates: Rates | None
) -> str:
    def section(body: str) -> str:
        return f"<section><h2>One layer on the clock</h2>{body}</section>"

    def missing(why: str) -> str:
        return section(f'<p class="hint">{escape(why)}</p>')

    if module is None:
        return missing("There is no compiled step whose schedule could be shown.")
    try:
        if rates is None:
            if target is None:
                raise ValueError("what this machine does in a second is not known")
            rates = rates_of(program.mesh, target.chip)
        timelines = layer_timelines(module, program.mesh, rates)
    except ValueError as error:
        return missing(f"Not drawn: {error}.")
    if not timelines:
        return missing("The compiled step has no loop over layers.")
    model = (
        "One trip of the compiled step's loop over layers, in XLA's order. Computed "
        f"from {rates.flops / 1e12:,.0f} TFLOP/s, {rates.memory / 1e9:,.0f} GB/s of "
        f"main memory, and the networks' rates: the shortest times that this "
        "schedule allows. Hover or tap for names, bytes and FLOPs."
    )
    return section(f"<p>{model}</p>{lanes.timeline_figures(timelines)}")


def _config(program: Program) -> str:
    text = escape(to_yaml(program.config))
    return f"<details><summary>Config</summary><pre>{text}</pre></details>"


_STYLE = """.command { margin: -8px 0 24px; white-space: pre-wrap;
  overflow-wrap: anywhere; color: var(--soft); }
.figures { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.figures dd { font-size: 18px; white-space: normal; overflow-wrap: anywhere; }
.prose td { white-space: normal; } p { max-width: 75ch; }
@media (max-width: 700px) { th, td { font-size: 12px; padding: 4px 0 4px 8px; }
  td:first-child { white-space: normal; } }
"""
