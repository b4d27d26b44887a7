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
from data.text.classify import classify
from data.text.documents import read_documents
from data.text.files import Format, units_of
from data.text.find import find_files
from data.text.records import ReadSettings

for name in ("plain", "packed"):
    (file,) = classify(find_files([name], "**/*"), ReadSettings()).files
    assert file.format is Format.fasta
    units = units_of(file)
    found = [one for unit in units for one in read_documents(unit, ReadSettings())]
    assert [one.id for one in found] == [f"sequence {n}" for n in range(20_000)]
    assert {one.text for one in found} == {b"ACGT" * 99 + b"\\n"}
"""


def hunks() -> list[tuple[str, str, str]]:
    """Return (file, old lines, new lines) for each hunk of the example."""
    page = (REPOSITORY / "docs/guides/extending.md").read_text()
    diff = page.partition(SECTION)[2].partition("```diff\n")[2].partition("```")[0]
    result = list[tuple[str, str, str]]()
    file = ""
    old = list[str]()
    new = list[str]()

    def finish_hunk() -> None:
        if old or new:
            result.append((file, "".join(old), "".join(new)))
        old.clear()
        new.clear()

    was_context = True
    for line in diff.splitlines(keepends=True):
        if line.startswith("# "):
            finish_hunk()
            file = line[2:].partition(",")[0].strip()
            continue
        is_context = line.startswith(" ")
        if is_context and not was_context and line[1:].strip() != "return False":
            finish_hunk()
        was_context = is_context
        if line[0] in " -":
            old.append(line[1:])
        if line[0] in " +":
            new.append(line[1:])
    finish_hunk()
    return result


def apply(folder: Path, file: str, old: str, new: str) -> None:
    path = folder / file
    if not path.exists():
        assert not old
        path.write_text(new)
        return
    content = path.read_text()
    assert content.count(old) == 1, f"{file}: {old}"
    path.write_text(content.replace(old, new))


def type_errors(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    result = subprocess.run(
        [*command, "data/text"], cwd=folder, capture_output=True, text=True
    )
    return [line for line in result.stdout.splitlines() if " error: " in line]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(REPOSITORY / "data", tmp_path / "data")
    for name, pack in (("plain", False), ("packed", True)):
        (tmp_path / name).mkdir()
        text = "".join(f">sequence {n}\n{'ACGT' * 99}\n" for n in range(20_000))
        (tmp_path / name / "a.fasta").write_text(text)
        if pack:
            subprocess.run(["gzip", "a.fasta"], cwd=tmp_path / name, check=True)
    return tmp_path


def test_a_reader_from_the_guide_reads_each_record_once(folder: Path):
    """The plain file has 8 MB, which are two units if a format can be split."""
    for hunk in hunks():
        apply(folder, *hunk)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    result = subprocess.run(
        [sys.executable, "-c", READ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_forgotten_format_is_an_error_of_the_type_checker(folder: Path):
    apply(folder, *hunks()[0])
    files_with_errors = {line.partition(":")[0] for line in type_errors(folder)}
    files_with_cases = {f"{folder}/{file}" for file, old, _ in hunks() if "case" in old}
    assert files_with_cases <= {path.strip() for path in files_with_errors}
