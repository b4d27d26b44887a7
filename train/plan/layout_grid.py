"""The layout of arrays as HTML: a select box, grids of chips, what a chip holds."""

import json
from html import escape

from train.plan.array_layout import layout_data
from train.program import Program

STYLE = """.grids { display: flex; flex-wrap: wrap; gap: 18px 26px;
  margin: 16px 0 8px; }
[hidden] { display: none !important; }
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
.cells button[aria-pressed=true] { outline: 3px solid var(--ink);
  outline-offset: -3px; }
@media (max-width: 700px) { .cells button { width: 21px; height: 22px;
  font-size: 9px; } }
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
        '<div class="choose"><label>Array '
        f'<select id="array">{options}</select></label>'
        '<label id="paging">Drawn <select id="drawn"></select></label></div>'
        '<p class="hint" id="spec"></p><div class="grids" id="grids"></div>'
        '<p id="held" aria-live="polite"></p>'
        '<p class="hint">Numbers count the parts of the array; chips with the same '
        "number hold the same part. Thick lines: borders of hosts. Optimizer moments "
        "and averages lie where their parameters lie.</p>"
        f'<script type="application/json" id="layout">{text}</script></section>'
    )


HELD = """
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
"""
SCRIPT = (
    HELD
    + """
const layout = JSON.parse(document.getElementById("layout").textContent);
const panels = layout.runs.flatMap(([pattern, place, step, host, hostStep, count]) =>
  Array.from({length: count}, (_, i) => ({...layout.patterns[pattern],
    first: place + i * step, host: host + i * hostStep})));
function titleOf(index) {
  const unit = Math.floor(index / layout.planes), plane = index % layout.planes;
  return `${layout.unit} ${unit}` + (layout.planes > 1 ? `, z ${plane}` : "");
}
function draw() {
  const array = layout.arrays[document.getElementById("array").value];
  const from = +document.getElementById("drawn").value, shown = panels.slice(
    from, from + layout.drawn);
  const names = array.spec.map(dim => dim.map(axis => layout.axes[axis])
    .filter(([, size]) => size > 1).map(([name]) => name));
  const dims = array.shape.map((size, i) =>
    size + (names[i].length ? ` over ${names[i].join(" and ")}` : ""));
  const {count} = held(array, 0), first = held(array, shown[0].first).number;
  const same = panels.filter(
    panel => held(array, panel.first).number === first).length;
  const more = panels.length - shown.length;
  const kind = layout.unit + (layout.planes > 1 ? " planes" : "s");
  document.getElementById("spec").textContent =
    `[${dims.join(", ")}] ${array.type}, ${array.bytes} a device, `
    + (count > 1 ? `cut into ${count.toLocaleString("en")} parts.` : "whole on each.")
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
)
