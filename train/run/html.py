"""Pages that need no network: one look in light and dark, wide and narrow."""

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from etils import epath


def page(
    title: str,
    body: str,
    light: str = "",
    dark: str = "",
    style: str = "",
    js: str = "",
) -> str:
    """Return a page as one HTML text.

    Args:
        title: plain text.
        body: HTML.
        light: custom properties of CSS, `--name: value;`.
        dark: those that differ in the dark.
        style: CSS of what only this page has.
        js: its script.
    """
    parts = {
        "title": escape(title),
        "light": light,
        "dark": dark,
        "style": style,
        "body": body,
        "js": f"<script>{js}</script>" if js else "",
    }
    head, *rest = _PAGE.split("{{")
    for piece in rest:
        name, _, text = piece.partition("}}")
        head += parts[name] + text
    return head


def write_page(path: epath.Path | Path, text: str) -> None:
    """Write a page atomically, on a local disk or under `gs://` or `s3://`."""
    path = epath.Path(path)
    if "://" in os.fspath(path):  # the upload of one object is atomic by itself
        path.write_bytes(text.encode())
    else:
        new = path.with_name(f"{path.name}.tmp")
        new.write_bytes(text.encode())
        new.replace(path)


def figures(items: list[tuple[str, str, str]]) -> str:
    """Return headline figures: title, value and note; the first two as HTML."""
    shown = (
        f"<div><dt>{title}</dt><dd>{value}<small>{note}</small></dd></div>"
        for title, value, note in items
    )
    return f'<dl class="figures">{"".join(shown)}</dl>'


def table(
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


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>
:root { color-scheme: light dark; --page: #fbfbfa; --ink: #1d2129; --soft: #667080;
  --rule: #e3e5e8; {{light}} }
@media (prefers-color-scheme: dark) { :root { --page: #15181d; --ink: #e6e8eb;
  --soft: #98a1ae; --rule: #2b3038; {{dark}} } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 28px 20px 48px;
  background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
h1 { font-size: 24px; margin: 0 0 20px; overflow-wrap: anywhere; }
h2, figcaption { font-size: 15px; font-weight: 600; margin: 0 0 10px; }
small, .hint, th, .plot span { color: var(--soft); font-weight: 400; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(120px, 1fr));
  gap: 18px 24px; margin: 0 0 32px; padding: 18px 0; border: solid var(--rule);
  border-width: 1px 0; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; font-size: 20px; font-weight: 600; line-height: 1.3;
  white-space: nowrap; }
dd small { display: block; font-size: 12px; line-height: 1.4; min-height: 1.4em;
  white-space: normal; }
output { position: absolute; display: none; top: 6px; padding: 5px 9px;
  border: 1px solid var(--rule); border-radius: 6px; background: var(--page);
  font-size: 12px; white-space: pre; pointer-events: none; }
section { margin-top: 36px; overflow-x: auto; }
.bar { display: flex; height: 22px; border-radius: 5px; overflow: hidden; gap: 1px; }
.bar i { flex-basis: 0; }
table { border-collapse: collapse; margin-top: 12px; min-width: min(100%, 460px); }
th, td { padding: 5px 0 5px 12px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
th.text, td.text { text-align: left; }
th, .hint { font-size: 13px; }
.scroll { overflow-x: auto; }
td i { display: inline-block; width: 10px; height: 10px; margin-right: 9px;
  border-radius: 3px; }
details { margin-top: 36px; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font-size: 13px; line-height: 1.45; }
{{style}}
</style></head><body>
{{body}}
{{js}}
</body></html>
"""
