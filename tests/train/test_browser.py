"""A browser opens every page without errors, draws it, and shows the JSON's figures."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.program import module_option
from train.units import format_bytes, format_count

pytestmark = pytest.mark.slow
SMALL = [
    *("model.num_layers=2", "model.embed_dim=32", "data.batch_size=4"),
    *("data.sequence_length=32", "tracker=none", "data=text", "data.path=text"),
]
CPU = "runtime.cpu_devices=1"
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--virtual-time-budget=5000", "--enable-logging=stderr"),
]
# This script uses each control of a page, and records what is visible afterwards.
SCRIPT = """<script>
const visible = selector => [...document.querySelectorAll(selector)].filter(part => {
  const {width, height} = part.getBoundingClientRect();
  return part.getTotalLength ? part.getTotalLength() > 0 : width * height > 0;
}).length;
const views = [];
const look = name => {
  for (const plot of document.querySelectorAll(".plot"))
    plot.dispatchEvent(new PointerEvent("pointermove", {clientX: 200, clientY: 200}));
  views.push({name, text: document.body.innerText, lines: visible("path.line"),
    cells: visible("path.cells"), bars: visible(".bar i")});
};
look("");
for (const name of [...document.querySelectorAll(".axes button")].map(b => b.value)) {
  document.querySelector(`.axes button[value="${name}"]`).click();
  look(name);
}
const seen = document.createElement("pre");
seen.id = "seen";
seen.textContent = JSON.stringify(views);
document.body.append(seen);
</script>"""


class Shown(NamedTuple):
    """The content of a page in a browser.

    data: the JSON in the page.
    views: the text and the number of drawn parts, first and after each control is used.
    """

    data: dict[str, Any]
    views: dict[str, dict[str, Any]]

    @property
    def first(self) -> dict[str, Any]:
        return self.views[""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Make the working folder of the commands, with a little text."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "text").mkdir()
    for n in range(20):
        (folder / "text" / f"{n}.txt").write_text(f"Zebra {n} eats grass. " * 40)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Callable[..., str]:
    """Return a function that runs a command in the folder, and returns its output."""

    def run(module: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        result = subprocess.run(
            [sys.executable, *module_option(module), *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode in codes, result.stderr
        return result.stdout

    return run


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Callable[[Path], Shown]:
    """Return a function that opens a page, and fails if the console has a message."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None and os.environ.get("LONGHAUL_FULL") != "1":
        pytest.skip("needs chromium")
    assert browser, "chromium is missing"

    def shown(page: Path) -> Shown:
        profile = tmp_path_factory.mktemp("profile")
        text = page.read_text()
        copy = page.with_name(f"shown-{page.name}")
        copy.write_text(text + SCRIPT)
        result = subprocess.run(
            [browser, *OPTIONS, f"--user-data-dir={profile}", copy.as_uri()],
            capture_output=True,
            text=True,
            timeout=1200,
        )
        messages = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
        assert messages == []
        (views_json,) = re.findall(r'<pre id="seen">(.+?)</pre>', result.stdout, re.S)
        views = {view["name"]: view for view in json.loads(html.unescape(views_json))}
        (data,) = re.findall(r'<script[^>]*id="data">(.*?)</script>', text, re.S)
        return Shown(json.loads(data), views)

    return shown


@pytest.fixture(scope="module")
def runs(run) -> list[str]:
    """Train two short runs, the second with experts."""
    overrides = (
        "train.num_steps=4",
        "log.interval_steps=1",
        "eval.final_num_batches=1",
    )
    experts = ("model=moe_nano", "log.numerics_interval_steps=1")
    run("train", "run.dir=a", *overrides, *SMALL, CPU)
    run("train", "run.dir=b", *overrides, *experts, *SMALL, CPU)
    return ["a", "b"]


@pytest.mark.parametrize(
    "options",
    [
        (CPU, "show=true"),
        ("target=h100-8", "mesh=fsdp", "data.batch_size=8"),
        ("target=v5e-8", "mesh=fsdp", "data.batch_size=8", "data.sequence_length=128"),
        ("target=h100-1", "model.num_layers=99", "model.mlp_dim=9999999"),
        ("target=h100-1", "data.batch_schedule=[{from_step: 0, rows: 2}]"),
    ],
    ids=["cpu", "gpu", "tpu", "too large", "growing"],
)
def test_a_plan_says_what_its_json_and_the_terminal_say(run, folder, shown, options):
    output = run("train.plan", "output=plan", *SMALL, *options, codes=(0, 4))
    plan = json.loads((folder / "plan/plan.json").read_text())
    page = shown(folder / "plan/plan.html")
    text = page.first["text"]
    assert page.data == plan
    assert f"{format_count(plan['num_parameters'])} parameters" in text
    parts = [plan["per_device"][name] for name in ("parameters", "optimizer state")]
    for figure in (plan["needed"], *parts):
        assert format_bytes(figure["bytes"]) in text
    assert page.first["bars"] > 0
    for array in plan["layout"]["arrays"]:
        assert array["name"] in text
    verdict = plan["verdict"]
    assert (verdict is None) is (CPU in options)
    if verdict:
        words = f"{verdict['answer']}, {verdict['reason']}"
        assert f"\nfits        {words}\n" in output
        assert f"Fits: {words}." in text
    if plan["prediction"] and verdict:
        (prediction,) = re.findall(r"^predicted +(.+)$", output, re.M)
        assert prediction in text


def test_the_report_of_a_run(runs, folder, shown):
    for name in runs:
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        last = [row for row in map(json.loads, lines) if "loss" in row][-1]
        page = shown(folder / name / "report.html")
        assert last["step"] == 4
        assert f"{last['loss']:.4f}" in page.first["text"]
        assert format_count(last["tokens"]) in page.first["text"]
        assert page.first["lines"] > 0
        assert page.first["bars"] > 0
    assert page.first["cells"] > 0  # heat maps of the experts


def test_the_comparison_of_runs(run, runs, folder, shown):
    run("train.report", f"runs=[{','.join(runs)}]", "output=both.html")
    page = shown(folder / "both.html")
    assert {"", "step", "tokens"} <= {*page.views}
    for view in page.views.values():
        assert view["lines"] >= len(runs)
    for _, _, rows in page.data["tables"]:
        for cell in (cell for row in rows for cell in row if cell):
            assert str(cell) in page.first["text"]


@pytest.mark.parametrize(
    ("widths", "depths"), [([16, 32], [1, 2]), ([16, 32], []), ([], [1, 3])]
)
def test_the_curves_of_coordinates(run, folder, shown, widths, depths):
    sizes = [f"widths={widths}".replace(" ", ""), f"depths={depths}".replace(" ", "")]
    optimizer = ("optimizer=adamw", "optimizer.base_width=16", "steps=1")
    heads = ("model.num_heads=4", "model.num_kv_heads=4")
    command = ("train.coordinates", *SMALL, CPU, *optimizer, *heads, *sizes)
    output_lines = run(*command, codes=(0, 5)).splitlines()
    page = shown(folder / "coordinates.html")
    axes = [name for name, values in (("width", widths), ("depth", depths)) if values]
    assert {*page.views} == {"", *axes}
    for view in page.views.values():
        assert view["lines"] > 5
    for _, _, rows in page.data["tables"]:
        for row in rows:
            assert row[0] in page.first["text"]
            assert any(line.split() == " ".join(row).split() for line in output_lines)
