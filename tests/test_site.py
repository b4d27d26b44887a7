"""A browser shows every table of the documentation uncut."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.fleet import REPOSITORY

MEASURE = """<script>
const cut = [...document.querySelectorAll("table")].filter(
  (table) => table.scrollWidth > table.clientWidth + 1 ||
    table.getBoundingClientRect().right > document.body.clientWidth,
);
document.title = `cut: ${cut.length}`;
</script>"""


@pytest.mark.slow
def test_tables_of_keys_fit_on_small_and_large_screens(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if os.environ.get("LONGHAUL_FULL") != "1":
        if browser is None:
            pytest.skip("needs chromium")
        pytest.importorskip("mkdocs")
    assert browser, "chromium is missing"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    subprocess.run([*command, "--site-dir", tmp_path], cwd=REPOSITORY, check=True)
    page = tmp_path / "reference/config/index.html"
    page.write_text(page.read_text() + MEASURE)
    for width in (500, 1280):
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        options += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000"]
        options += ["--allow-file-access-from-files", f"--window-size={width},1000"]
        result = subprocess.run(
            [browser, *options, page.as_uri()], capture_output=True, text=True
        )
        assert re.findall(r"<title>(cut: \d+)</title>", result.stdout) == ["cut: 0"]
