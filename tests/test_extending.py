"""The example of a dataset format in docs/guides/extending.md works as it stands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY

SECTION = "## A dataset format"
READ = """
from data.catalog import FORMATS
from data.text.classify import classify
from data.text.documents import read_documents
from data.text.files import units_of
from data.text.find import find_files
from data.text.records import ReadSettings

for name in ("plain", "packed"):
    (file,) = classify(find_files([name], "**/*"), ReadSettings(), FORMATS).files
    assert file.format.name == "fasta"
    units = units_of(file)
    found = [one for unit in units for one in read_documents(unit, ReadSettings())]
    assert [one.id for one in found] == [f"sequence {n}" for n in range(20_000)]
    assert {one.text for one in found} == {b"ACGT" * 99 + b"\\n"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the example applied to the source, and files to read."""
    shutil.copytree(REPOSITORY / "data", tmp_path / "data")
    page = (REPOSITORY / "docs/guides/extending.md").read_text()
    diff = page.partition(SECTION)[2].partition("```diff\n")[2].partition("```")[0]
    ceiling = {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(
        ["git", "apply", "-"],
        cwd=tmp_path,
        input=diff,
        text=True,
        check=True,
        env=os.environ | ceiling,
    )
    for name, pack in (("plain", False), ("packed", True)):
        (tmp_path / name).mkdir()
        text = "".join(f">sequence {n}\n{'ACGT' * 99}\n" for n in range(20_000))
        (tmp_path / name / "a.fasta").write_text(text)
        if pack:
            subprocess.run(["gzip", "a.fasta"], cwd=tmp_path / name, check=True)
    return tmp_path


def test_a_reader_from_the_guide_reads_each_record_once(folder: Path):
    """The plain file has 8 MB, which are two units if a format can be split."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    result = subprocess.run(
        [sys.executable, "-c", READ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
