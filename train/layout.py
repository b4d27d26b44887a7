"""Which chip holds which slice of an array, as a grid over the machine's coordinates.

A panel is what lies in one plane: a slice of TPUs in two dims, a plane of one in three,
a node of GPUs. Panels are alike but for where their first device lies in the mesh, so
the page carries each pattern once, and its script works out who holds what.
"""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from model.params import named
from train.describe import bytes_per_device
from train.mesh import Device
from train.program import Program
from train.progress import format_bytes

_DRAWN = 320  # chips at a time
_COLUMNS = 8  # of a node

STYLE = """.grids { display: flex; flex-wrap: wrap; gap: 18px 26px; margin: 16px 0 8px; }
.grids figcaption { font-size: 12px; font-weight: 400; color: var(--soft);
  margin: 0 0 4px; }
.grids figure { margin: 0; }
.cells { display: grid; gap: 0; }
.cells button { width: 34px; height: 30px; padding: 0; border: 1px solid var(--page);
  border-radius: 3px; color: var(--ink); font: 11px system-ui, sans-serif;
  background: hsl(var(--h) 60% var(--cell)); cursor: pointer; }
.cells .wall { border-left: 2px solid var(--ink); border-radius: 0 3px 3px 0; }
.cells .ceiling { border-top: 2px solid var(--ink); border-radius: 0 0 3px 3px; }
.cells .wall.ceiling { border-radius: 0 0 3px 0; }
.cells button[aria-pressed=true] { outline: 2px solid var(--ink); z-index: 1; }
@media (max-width: 700px) { .cells button { width: 21px; height: 22px; font-size: 9px; } }
.choose { display: flex; flex-wrap: wrap; gap: 10px 18px; font-size: 13px; }
.choose label { display: flex; gap: 8px; align-items: center; min-width: 0; }
select { font: inherit; color: inherit; background: var(--page); max-width: 100%;
  min-width: 0; border: 1px solid var(--rule); border-radius: 6px; padding: 4px 6px; }
#held { font-size: 13px; min-height: 3em; margin: 8px 0 0; }"""
LIGHT, DARK = "--cell: 82%;", "--cell: 30%;"


def layout_section(program: Program) -> str:
    """Draw where arrays lie: a select box, the grids, and what a chip holds."""
    data = layout_data(program)
    options = "".join(
        f'<option value="{i}">{escape(array["name"])}</option>'
        for i, array in enumerate(data["arrays"])
    )
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        "<section><h2>Where arrays lie</h2>"
        f'<div class="choose"><label>Array <select id="array">{options}</select></label>'
        '<label id="paging">Drawn <select id="drawn"></select></label></div>'
        '<p class="hint" id="spec"></p><div class="grids" id="grids"></div>'
        '<p id="held" aria-live="polite"></p>'
        '<p class="hint">Numbers count the slices of the array; chips with the same '
        "number hold the same slice. Thick lines: borders of hosts. Optimizer moments "
        "and averages lie where their parameters lie.</p>"
        f'<script type="application/json" id="layout">{text}</script></section>'
    )


def layout_data(program: Program) -> dict[str, Any]:
    """Give what the page's script needs.

    Returns:
        axes: [name, size] of the mesh, slowest first.
        unit: what a panel belongs to: `slice`, `node` or `process`.
        planes: panels of a unit.
        columns, drawn: of a panel; panels at a time.
        patterns: `places` and `hosts` of the devices of a panel, from the least on; a
            place is one in `mesh.devices.flat`.
        runs: [pattern, first place, step, first host, step, how many panels].
        arrays: name, type, shape, bytes on a device, and spec: of each dim the numbers
            of its mesh axes.
    """
    mesh = program.mesh
    places = {device: place for place, device in enumerate(mesh.devices.flat)}
    panels = dict[tuple[int, ...], list[Device]]()
    for device in mesh.devices.flat:
        panels.setdefault(_panel(device), []).append(device)
    first = next(iter(panels.values()))
    flat = not _on_grid(first[0])
    columns = len(first) if flat else len({_column(device) for device in first})
    patterns, runs = list[dict[str, list[int]]](), list[list[int]]()
    for _, devices in sorted(panels.items()):
        inside = sorted(devices, key=lambda device: (_row(device), _column(device)))
        at = [places[device] for device in inside]
        hosts = [device.process_index for device in inside]
        low, host = min(at), min(hosts)
        pattern = {"places": [p - low for p in at], "hosts": [h - host for h in hosts]}
        if pattern not in patterns:
            patterns.append(pattern)
        _append(runs, patterns.index(pattern), low, host)
    return {
        "axes": [[name, size] for name, size in mesh.shape.items()],
        "unit": _unit(first[0]),
        "planes": len({device.coords[2] for device in mesh.devices.flat})
        if _on_grid(first[0]) and len(first[0].coords) > 2
        else 1,
        "columns": min(columns, _COLUMNS) if flat else columns,
        "drawn": max(1, _DRAWN // len(first)),
        "patterns": patterns,
        "runs": runs,
        "arrays": [_array(name, leaf) for name, leaf in _arrays(program)],
    }


def _append(runs: list[list[int]], pattern: int, place: int, host: int) -> None:
    """Add a panel to the last run if it goes on like it, else begin a run."""
    if runs and runs[-1][0] == pattern:
        _, first, step, first_host, host_step, count = runs[-1]
        if count == 1:
            step, host_step = place - first, host - first_host
        on = place == first + count * step and host == first_host + count * host_step
        if on:
            runs[-1] = [pattern, first, step, first_host, host_step, count + 1]
            return
    runs.append([pattern, place, 0, host, 0, 1])


def _arrays(program: Program) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    """Name parameters, fields of the batch, and what else does not lie like them."""
    params = list(named(program.state.params))
    yield from params
    for name, leaf in named(program.batch._asdict()):
        yield f"batch.{name}", leaf
    for name, leaf in named(program.state):
        if not any(name.endswith(known) for known, _ in params):
            yield name, leaf


def _array(name: str, leaf: jax.ShapeDtypeStruct) -> dict[str, Any]:
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    return {
        "name": name,
        "type": str(leaf.dtype),
        "shape": leaf.shape,
        "bytes": format_bytes(bytes_per_device(leaf)),
        "spec": _dims(sharding.spec, list(sharding.mesh.axis_names), len(leaf.shape)),
    }


def _dims(spec: PartitionSpec, names: list[str], rank: int) -> list[list[int]]:
    entries = [*spec, *[None] * rank][:rank]
    dims = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    return [[names.index(axis) for axis in dim] for dim in dims]


def _on_grid(device: Device) -> bool:
    return device.platform == "tpu"


def _unit(device: Device) -> str:
    return {"tpu": "slice", "cpu": "process"}.get(device.platform, "node")


def _panel(device: Device) -> tuple[int, ...]:
    if not _on_grid(device):
        return (device.process_index,)
    return getattr(device, "slice_index", 0), *device.coords[2:]


def _row(device: Device) -> int:
    return device.coords[1] if _on_grid(device) else 0


def _column(device: Device) -> tuple[int, int]:
    """Order the devices of a row; those of one chip stand side by side."""
    if _on_grid(device):
        return device.coords[0], device.core_on_chip
    return device.id, 0


SCRIPT = """
const layout = JSON.parse(document.getElementById("layout").textContent);
const panels = layout.runs.flatMap(([pattern, place, step, host, hostStep, count]) =>
  Array.from({length: count}, (_, i) => ({...layout.patterns[pattern],
    first: place + i * step, host: host + i * hostStep})));
function coordinates(place) {
  return layout.axes.map(([, size]) => size).reduceRight(([rest, at], size) =>
    [Math.floor(rest / size), [rest % size, ...at]], [place, []])[1];
}
function held(array, place) {
  const at = coordinates(place);
  let number = 0, count = 1;
  const slice = array.shape.map((size, dim) => {
    let part = 0, parts = 1;
    for (const axis of array.spec[dim]) {
      part = part * layout.axes[axis][1] + at[axis];
      parts *= layout.axes[axis][1];
    }
    number = number * parts + part;
    count *= parts;
    return [part * size / parts, (part + 1) * size / parts];
  });
  return {number, count, slice};
}
function titleOf(index) {
  const unit = Math.floor(index / layout.planes), plane = index % layout.planes;
  return `${layout.unit} ${unit}` + (layout.planes > 1 ? `, z ${plane}` : "");
}
function draw() {
  const array = layout.arrays[document.getElementById("array").value];
  const from = +document.getElementById("drawn").value, shown = panels.slice(
    from, from + layout.drawn);
  const names = array.spec.map(dim => dim.map(axis => layout.axes[axis][0]).join("+"));
  const dims = array.shape.map((size, i) => size + (names[i] ? ` over ${names[i]}` : ""));
  const {count} = held(array, 0), first = held(array, shown[0].first).number;
  const same = panels.filter(panel => held(array, panel.first).number === first).length;
  const more = panels.length - shown.length;
  const kind = layout.unit + (layout.planes > 1 ? " planes" : "s");
  document.getElementById("spec").textContent =
    `[${dims.join(", ")}] ${array.type}, ${array.bytes} a device, `
    + (count > 1 ? `cut into ${count.toLocaleString("en")} slices.` : "whole everywhere.")
    + (more ? ` And ${more.toLocaleString("en")} more ${kind} like it`
      + (same === panels.length ? ", which hold the same." : `: of all `
        + `${panels.length.toLocaleString("en")}, ${same.toLocaleString("en")} `
        + `hold what ${titleOf(from)} holds.`) : "");
  const grids = document.getElementById("grids");
  grids.replaceChildren(...shown.map((panel, i) => drawPanel(array, panel, from + i)));
  grids.querySelector("button").click();
}
function drawPanel(array, panel, index) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = titleOf(index);
  const cells = document.createElement("div"), columns = layout.columns;
  cells.className = "cells";
  cells.style.gridTemplateColumns = `repeat(${columns}, max-content)`;
  panel.places.forEach((offset, i) => {
    const place = panel.first + offset, {number, count, slice} = held(array, place);
    const cell = document.createElement("button"), host = panel.hosts[i];
    cell.textContent = number;
    cell.style.setProperty("--h", Math.round(205 + 300 * number / count) % 360);
    if (i % columns && panel.hosts[i - 1] !== host) cell.classList.add("wall");
    if (i >= columns && panel.hosts[i - columns] !== host)
      cell.classList.add("ceiling");
    cell.onclick = () => {
      document.querySelector("[aria-pressed=true]")?.removeAttribute("aria-pressed");
      cell.setAttribute("aria-pressed", "true");
      const at = coordinates(place).map((k, axis) => [layout.axes[axis], k])
        .filter(([[, size]]) => size > 1).map(([[name], k]) => `${name} ${k}`);
      document.getElementById("held").textContent =
        `${titleOf(index)}, row ${Math.floor(i / columns)}, column ${i % columns} `
        + `(host ${panel.host + host}; ${at.join(", ") || "the only device"}) holds [`
        + slice.map(([a, b]) => `${a}:${b}`).join(", ") + "]";
    };
    cells.append(cell);
  });
  figure.append(caption, cells);
  return figure;
}
for (let from = 0; from < panels.length; from += layout.drawn) {
  const to = Math.min(from + layout.drawn, panels.length) - 1;
  const text = titleOf(from) + (to > from ? ` to ${titleOf(to)}` : "");
  document.getElementById("drawn").add(new Option(text, from));
}
document.getElementById("paging").hidden = panels.length <= layout.drawn;
document.getElementById("array").onchange = draw;
document.getElementById("drawn").onchange = draw;
draw();
"""
