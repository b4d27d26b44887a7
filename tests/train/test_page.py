"""Each page is complete, fetches nothing and writes numbers as the console does."""

import json
import random
import re
from pathlib import Path

import pytest

from data.program import FOLDER
from tests.train.pages import Page, data_of, drawn, run_scripts
from train.page import write_page
from train.units import format_bytes, format_count, format_flops

TEMPLATES = [FOLDER / "train" / name for name in ("run/report.html", "plan/plan.html")]


@pytest.fixture
def write(tmp_path):
    def write(data: dict, template: Path = TEMPLATES[0]) -> str:
        write_page(tmp_path / "page.html", template, data)
        assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
        return (tmp_path / "page.html").read_text()

    return write


def test_any_data_can_be_read_back_from_a_page(write):
    data = {"a": "</script><!--<script>'\"&\u2028\ud800", "{{template}}": "{{data}}"}
    assert data_of(write(data)) == data
    assert Page(write(data)).tags == Page(write({})).tags
    with pytest.raises(ValueError, match="JSON"):  # no browser would read it
        write({"loss": float("nan")})


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_nothing_is_fetched(write, template):
    html = write({}, template)
    page = Page(html)
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    for pattern in ("http:", "https:", "url(", "@import", "import(", "fetch("):
        assert pattern not in html
    colors = set(re.findall(r"var\((--[a-z0-9-]+)\)", html))
    assert colors <= set(re.findall(r"(--[\w-]+):", html))


def test_numbers_are_written_as_the_console_writes_them(tmp_path):
    (tmp_path / "template").write_text("</head><body></body>")
    write_page(tmp_path / "page.html", tmp_path / "template", {})
    rng = random.Random(0)
    edges = [1, 1.125, 999.4, 999.5, 1023.99, 1023.996, 1152 * 2**20, 2**50, 1e21]
    values = edges + [10 ** rng.uniform(-1, 22) for _ in range(2000)]
    script = f"""console.log(JSON.stringify({json.dumps(values)}.map(
      value => [bytes(value), count(value), flops(value), percent(1 / value, 1)])))"""
    html = (tmp_path / "page.html").read_text()
    for value, texts in zip(values, json.loads(run_scripts(html, script)), strict=True):
        expected = [format_bytes(value), format_count(value), format_flops(value)]
        assert texts == [*expected, f"{1 / value:.1%}"]


@pytest.mark.parametrize("axes", [["width", "depth"], ["depth"], ["step", "tokens"]])
def test_the_first_axis_is_drawn_whatever_its_name(write, axes):
    def content(name: str) -> dict:
        lines = [{"name": "a", "points": [[1, 2.0], [2, 3.0]]}]
        return {"title": f"By {name}", "x": [1, 2], "y": [0, 4], "lines": lines}

    charts = {name: [content(name) | {"cut": None}] for name in axes}
    page = drawn(write({"name": "x", "tables": [], "axes": charts, "restarts": []}))
    assert f"\nBy {axes[0]}\n" in page.text
    pressed = [value for name, value in page.attributes if name == "aria-pressed"]
    assert pressed == ["true", *["false"] * (len(axes) - 1)]
    assert ("aria-label", f"By {axes[0]} by {axes[0]}") in page.attributes
