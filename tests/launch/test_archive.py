"""The archive of a checkout holds all of the code and nothing else."""

import gzip
import os
import shutil
from pathlib import Path

from data.program import FOLDER, PACKAGES, ROOT
from launch.archive import files_to_pack, make_archive
from tests.launch.kinds import contents
from tests.program import PACKAGES_PATH, SOURCE_TREE

WHOLE = [
    *("configs/mesh/fsdp.yaml", "pyproject.toml", "train/__init__.py"),
    *("train/moe.py", "train/py.typed", "train/same.py", "train/step.py"),
]


@SOURCE_TREE
def test_the_archive_holds_the_working_tree_and_nothing_else(checkout: Path):
    assert files_to_pack(checkout) == WHOLE
    packed = make_archive(checkout)
    assert contents(packed)["train/step.py"] == b"new = 2\n"
    assert contents(packed)["train/same.py"] == b"new = 2\n"
    for secret in (b"secret", b".git/", str(checkout).encode(), b"root"):
        assert secret not in gzip.decompress(packed)


@SOURCE_TREE
def test_without_git_the_archive_holds_what_a_package_would(checkout: Path):
    shutil.rmtree(checkout / ".git")
    (checkout / "configs/mine.yaml").unlink()  # without git no rule ignores it
    assert files_to_pack(checkout) == WHOLE


def test_the_archive_of_this_program_is_complete():
    """The archive holds every file of the packages."""
    names = set(files_to_pack(ROOT))
    for package in PACKAGES:
        for path in (FOLDER / package).rglob("*.*"):
            if "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix() in names
    assert {"pyproject.toml", "LICENSE", "README.md"} <= names
    assert len(make_archive(ROOT)) < 2**20


def test_equal_files_give_equal_bytes(checkout: Path, tmp_path: Path):
    copy = tmp_path / "again"
    shutil.copytree(checkout, copy, symlinks=True, copy_function=shutil.copyfile)
    step = copy / PACKAGES_PATH / "train/step.py"
    os.utime(step, (1, 1))
    step.chmod(0o700)
    assert make_archive(copy) == make_archive(checkout)
    assert make_archive(copy)[4:8] == bytes(4)  # gzip's time (RFC 1952)
    step.write_text("new = 3\n")
    assert make_archive(copy) != make_archive(checkout)
