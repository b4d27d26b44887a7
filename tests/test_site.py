"""A browser shows every table of the site uncut, and llms.txt lists its pages."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY
from tests.program import SOURCE_TREE

pytestmark = SOURCE_TREE

MEASURE = """<script>
const cut = [...document.querySelectorAll("table")].filter(
  (table) => table.scrollWidth > table.clientWidth + 1 ||
    table.getBoundingClientRect().right > document.body.clientWidth,
);
document.title = `cut: ${cut.length}`;
</script>"""


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    subprocess.run([*command, "--site-dir", folder], cwd=REPOSITORY, check=True)


@pytest.mark.slow
def test_tables_of_keys_fit_on_small_and_large_screens(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if os.environ.get("LONGHAUL_FULL") != "1":
        if browser is None:
            pytest.skip("needs chromium")
        pytest.importorskip("mkdocs")
    assert browser, "chromium is missing"
    build(tmp_path)
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


def test_every_page_of_the_navigation_is_in_llms_txt(tmp_path):
    pytest.importorskip("mkdocs")
    build(tmp_path)
    text = (tmp_path / "llms.txt").read_text()
    assert re.match(r"# Longhaul\n\n> [A-Z].+\.\n\n- \[", text)
    assert re.findall("^## (.+)$", text, re.M) == ["Guides", "Reference", "Log"]
    entries = re.findall(r"^- \[([^]]+)\]\(([^)]+)\): (.+[.?!])$", text, re.M)
    assert len(entries) == text.count("\n- ") == text.count("](")
    names = re.findall(r"^ +- (.+)\.md$", (REPOSITORY / "mkdocs.yml").read_text(), re.M)
    linked = {str((tmp_path / url / "index.html").resolve()) for _, url, _ in entries}
    pages = {name.removesuffix("index").rstrip("/") for name in names}
    assert len(pages) > 30
    assert linked == {str(tmp_path / page / "index.html") for page in pages}
    assert all(Path(page).exists() for page in linked)
    assert not list(tmp_path.rglob("*.py*"))
