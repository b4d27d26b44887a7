"""A browser opens both pages without errors and shows the figures of the JSON."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from train.units import format_bytes, format_count

pytestmark = pytest.mark.slow
SMALL = [
    *("model.num_layers=2", "model.embed_dim=32", "data.batch_size=4"),
    *("data.sequence_length=32", "runtime.cpu_devices=1", "tracker=none"),
]


def run(*command: str, folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(
        [sys.executable, "-m", *command, *SMALL],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Return a function that opens a page and returns its text and console errors."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None and os.environ.get("LONGHAUL_FULL") != "1":
        pytest.skip("needs chromium")
    assert browser, "chromium is missing"
    profile = tmp_path_factory.mktemp("profile")

    def shown(page: Path) -> tuple[str, list[str]]:
        script = "<script>document.title = 'drawn'</script>"
        copy = page.with_name(f"shown-{page.name}")
        copy.write_text(page.read_text() + script)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        options += ["--virtual-time-budget=5000", "--enable-logging=stderr"]
        done = subprocess.run(
            [browser, *options, f"--user-data-dir={profile}", copy.as_uri()],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "<title>drawn</title>" in done.stdout, done.stderr
        return done.stdout, [ln for ln in done.stderr.splitlines() if "CONSOLE" in ln]

    return shown


def test_the_page_of_a_plan(shown, tmp_path):
    run("train.plan", "show=true", "output=plan", folder=tmp_path)
    plan = json.loads((tmp_path / "plan/plan.json").read_text())
    text, errors = shown(tmp_path / "plan/plan.html")
    assert errors == []
    assert f"{format_count(plan['num_parameters'])} parameters" in text
    parts = [plan["per_device"][name] for name in ("parameters", "optimizer state")]
    for figure in (plan["needed"], *parts):
        assert format_bytes(figure["bytes"]) in text


def test_the_report_of_a_run(shown, tmp_path):
    more = ("train.num_steps=4", "log.interval_steps=1", "eval.final_num_batches=1")
    run("train", "run.dir=run", *more, folder=tmp_path)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    last = [row for row in map(json.loads, lines) if "loss" in row][-1]
    text, errors = shown(tmp_path / "run/report.html")
    assert errors == []
    assert last["step"] == 4
    assert f"{last['loss']:.4f}" in text
    assert format_count(last["tokens"]) in text
