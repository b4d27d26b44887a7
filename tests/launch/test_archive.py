"""The archive of a checkout holds all of the code and nothing else."""

import gzip
import os
import shutil
from pathlib import Path

from launch.archive import files_to_pack, make_archive
from tests.fleet import REPOSITORY
from tests.launch.kinds import contents

WHOLE = [
    *("configs/mesh/fsdp.yaml", "pyproject.toml", "train/__init__.py"),
    *("train/moe.py", "train/py.typed", "train/same.py", "train/step.py"),
]


def test_the_archive_holds_the_working_tree_and_nothing_else(checkout: Path):
    assert files_to_pack(checkout) == WHOLE
    packed = make_archive(checkout)
    assert contents(packed)["train/step.py"] == b"new = 2\n"
    assert contents(packed)["train/same.py"] == b"new = 2\n"
    for secret in (b"secret", b".git/", str(checkout).encode(), b"root"):
        assert secret not in gzip.decompress(packed)


def test_without_git_the_archive_holds_what_a_package_would(checkout: Path):
    shutil.rmtree(checkout / ".git")
    (checkout / "configs/mine.yaml").unlink()  # without git no rule ignores it
    assert files_to_pack(checkout) == WHOLE


def test_the_archive_of_this_program_is_complete():
    """The archive holds every file that setuptools is configured to package."""
    names = set(files_to_pack(REPOSITORY))
    for package in ("configs", "data", "launch", "model", "train"):
        for suffix in ("py", "yaml"):
            for path in (REPOSITORY / package).rglob(f"*.{suffix}"):
                assert path.relative_to(REPOSITORY).as_posix() in names
    assert {"pyproject.toml", "LICENSE", "README.md"} <= names
    assert len(make_archive(REPOSITORY)) < 2**20


def test_equal_files_give_equal_bytes(checkout: Path, tmp_path: Path):
    copy = tmp_path / "again"
    shutil.copytree(checkout, copy, symlinks=True, copy_function=shutil.copyfile)
    os.utime(copy / "train/step.py", (1, 1))
    (copy / "train/step.py").chmod(0o700)
    assert make_archive(copy) == make_archive(checkout)
    assert make_archive(copy)[4:8] == bytes(4)  # gzip's time (RFC 1952)
    (copy / "train/step.py").write_text("new = 3\n")
    assert make_archive(copy) != make_archive(checkout)
