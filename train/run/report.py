"""The picture of a run: `report.html`, one file that needs no network.

Drawn from the metrics, the events and `config.yaml`, whichever are there, so it can be
written again at any time.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from etils import epath

from train.run.charts import Point, Series, chart, finite
from train.run.goodput import Goodput, account
from train.run.html import figures, page, write_page
from train.run.metrics import read_events, read_metrics
from train.run.timeline import timeline
from train.units import format_count, format_seconds

Row = dict[str, Any]
_METRICS = (
    *("loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "mfu"),
    *("eval/loss", "eval/bits_per_byte"),
)
_CHARTS = (  # title, (metric, name of the line)..., whether the axis starts at zero
    ("Loss", (("loss", "training"), ("eval/loss", "validation")), False),
    ("Gradient norm", (("grad_norm", "gradient norm"),), True),
    ("Learning rate", (("learning_rate", "learning rate"),), True),
    ("Tokens per second", (("tokens_per_second", "tokens/s"),), True),
)


def write_report(run_dir: epath.Path | Path) -> epath.Path:
    """Write `<run_dir>/report.html` atomically and return its path.

    Missing or empty files, single points and null values leave gaps, not errors.
    """
    run_dir = epath.Path(run_dir)
    path = run_dir / "config.yaml"
    config = path.read_bytes().decode(errors="replace") if path.exists() else ""
    name, total = _from_config(config)
    rows, events = read_metrics(run_dir), read_events(run_dir)
    goodput = account(events)
    series = {key: _series(rows, key) for key in _METRICS}
    name, restarts = name or run_dir.name, _restarts(events)
    charts = "".join(chart(series, restarts, *lines) for lines in _CHARTS)
    body = [f"<h1>{escape(name)}</h1>", _figures(series, goodput, total)]
    body.append(f'<div class="charts">{charts}</div>')
    if charts and restarts:
        body.append(
            '<p class="hint">Dotted lines: a later start went on from here.</p>'
        )
    body.append(timeline(goodput))
    if config:
        body.append(f"<details><summary>Config</summary><pre>{escape(config)}</pre>")
        body.append("</details>")
    report = run_dir / "report.html"
    write_page(report, page(name, "\n".join(body), _LIGHT, _DARK, _STYLE, _SCRIPT))
    return report


def _from_config(text: str) -> tuple[str | None, int | None]:
    """Return `run.name` and `train.num_steps`, None where not said."""
    try:
        config = yaml.safe_load(text) or {}
        name = (config.get("run") or {}).get("name")
        total = (config.get("train") or {}).get("num_steps")
    except (yaml.YAMLError, AttributeError):
        return None, None
    return str(name) if name else None, total if isinstance(total, int) else None


def _number(value: object) -> float | None:
    good = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]


def _series(rows: Sequence[Row], key: str) -> list[Point]:
    points = [(_number(row.get("step")), row[key]) for row in rows if key in row]
    return [(step, _number(value)) for step, value in points if step is not None]


def _restarts(events: Sequence[Row]) -> list[float]:
    """Return the steps that starts after the first went on from, where recorded."""
    restores = [e for e in events if e.get("event") == "restore"]
    return [
        e["step"] for e in restores if e.get("start", 1) > 1 and _number(e.get("step"))
    ]


def _figures(series: Series, goodput: Goodput, total: int | None) -> str:
    items: list[tuple[str, str, str]] = []
    if steps := [x for points in series.values() for x, _ in points]:
        of = f"of {total:,}" if total else ""
        items.append(("Steps", f"{max(steps):,.0f}", of))
    if tokens := finite(series["tokens"]):
        items.append(("Tokens", format_count(tokens[-1][1]), ""))
    if losses := finite(series["loss"]):
        bad = len(series["loss"]) - len(losses)
        note = f"{bad:,} not finite" if bad else ""
        items.append(("Final loss", f"{losses[-1][1]:.4f}", note))
    if scores := finite(series["eval/loss"]):
        step, best = min(scores, key=lambda point: point[1])
        bits = dict(series["eval/bits_per_byte"]).get(step)
        note = f"{bits:.4f} bits per byte, " if bits is not None else ""
        note += f"at step {step:,.0f}"
        items.append(("Best validation loss", f"{best:.4f}", note))
    if goodput.wall_s:
        starts = len(goodput.starts)
        note = f"{starts} starts" if starts > 1 else ""
        items.append(("Wall time", format_seconds(goodput.wall_s), note))
        note = f"{goodput.num_wasted:,} steps done again" if goodput.num_wasted else ""
        items.append(("Goodput", f"{goodput.fraction:.1%}", note))
    if speeds := [y for _, y in finite(series["tokens_per_second"])]:
        items.append(("Tokens per second", format_count(median(speeds)), "median"))
    if mfus := [y for _, y in finite(series["mfu"])]:
        items.append(("MFU", f"{median(mfus):.1%}", "median"))
    if not items:
        return '<p class="hint">Nothing has been logged yet.</p>'
    return figures(items)


_LIGHT = """--s0: #2f6fb3; --s1: #d0762b; --step: #2f6fb3;
  --wasted: #b5546a; --data_wait: #8468b0; --eval: #4f9d78; --save: #d0762b;
  --check: #8a9a3c; --restore: #4aa3b5; --prepare: #d9a441; --init: #c4b46a;
  --start: #a58e74; --close: #7d8794; --idle: #d3d7dc; --other: #a3abb5;"""
_DARK = """--s0: #6ea8e0; --s1: #eb9a55; --step: #5a95d0;
  --idle: #3d444e; --other: #656e7b;"""
_STYLE = """.charts { display: grid; gap: 32px 36px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; gap: 16px; align-items: baseline; }
.key { font-size: 13px; font-weight: 400; } .k0 { margin-left: auto; }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px;
  margin-right: 6px; vertical-align: middle; border-radius: 2px; }
.k0::before { background: var(--s0); } .k1::before { background: var(--s1); }
.plot { position: relative; height: 220px; margin: 0 10px 26px 48px;
  touch-action: pan-y; }
svg { display: block; width: 100%; height: 100%; overflow: visible; }
path { fill: none; vector-effect: non-scaling-stroke; }
.grid { stroke: var(--rule); } .line { stroke-width: 1.5; stroke-linejoin: round; }
.restart { stroke: var(--soft); stroke-dasharray: 3 4; }
.dots { stroke-width: 6; stroke-linecap: round; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); }
.plot span { position: absolute; font-size: 12px; line-height: 1; white-space: nowrap; }
.plot .y { right: 100%; margin-right: 8px; transform: translateY(-50%); }
.plot .x { top: 100%; margin-top: 8px; transform: translateX(-50%); }
.cursor { position: absolute; display: none; top: 0; bottom: 0; width: 1px;
  background: var(--soft); pointer-events: none; }
.starts { display: grid; grid-template-columns: max-content 1fr; gap: 5px 16px;
  align-items: center; margin-top: 28px; max-height: 480px; overflow-y: auto; }
.starts span { font-size: 13px; } .starts small { margin-left: 8px; }
.starts .bar { height: 12px; border-radius: 3px; gap: 0; }"""
_SCRIPT = """
for (const plot of document.querySelectorAll(".plot")) {
  const {left, right, lines} = JSON.parse(plot.nextElementSibling.textContent);
  const cursor = plot.querySelector(".cursor"), tip = plot.querySelector("output");
  const show = on => cursor.style.display = tip.style.display = on ? "block" : "none";
  const nearest = (points, x) => points.reduce(
    (a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  plot.onpointerleave = () => show(false);
  plot.onpointermove = plot.onpointerdown = event => {
    const box = plot.getBoundingClientRect();
    const step = left + (event.clientX - box.left) / box.width * (right - left);
    const found = lines.map(line => nearest(line.points, step));
    const at = 100 * (found[0][0] - left) / (right - left);
    tip.textContent = lines.map((line, i) => `step ${found[i][0].toLocaleString("en")}`
      + `  ${line.name} ${+found[i][1].toPrecision(5)}`).join("\\n");
    cursor.style.left = at + "%";
    tip.style.left = at < 50 ? `calc(${at}% + 10px)` : "auto";
    tip.style.right = at < 50 ? "auto" : `calc(${100 - at}% + 10px)`;
    show(true);
  };
}
"""
