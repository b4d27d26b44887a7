"""Fixture: a git checkout from which an archive of the code is made."""

import subprocess
from pathlib import Path

import pytest

from tests.program import PACKAGES_PATH


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a small program in git, next to files that must not be packed."""
    root = tmp_path / "checkout"
    program = root / PACKAGES_PATH
    files = {
        "__init__.py": "",
        "train/__init__.py": "",
        "train/step.py": "old = 1\n",
        "train/gone.py": "",
        "train/py.typed": "",
        "configs/mesh/fsdp.yaml": "fsdp: -1\n",
        "pyproject.toml": "[project]\n",
        "tests/test_step.py": "",
        "train/notes.txt": "",
        ".gitignore": "__pycache__/\nruns/\nmine.yaml\n",
        ".ci/run.py": "",
    }
    for name, text in files.items():
        (program / name).parent.mkdir(parents=True, exist_ok=True)
        (program / name).write_text(text)
    git(program, "init", "-q")
    git(program, "add", "-A")
    git(program, "commit", "-qm", "all")
    (program / "train/step.py").write_text("new = 2\n")
    (program / "train/moe.py").write_text("experts = 8\n")
    (program / "train/gone.py").unlink()
    for name in (
        *("train/__pycache__/step.pyc", "train/.env", "runs/base/config.yaml"),
        *("configs/mine.yaml", "configs/.secret.yaml", "key.json", "train/key.json"),
    ):
        (program / name).parent.mkdir(parents=True, exist_ok=True)
        (program / name).write_text("secret")
    (tmp_path / "outside.py").write_text("secret")
    (program / "train/link.py").symlink_to(tmp_path / "outside.py")
    (program / "train/same.py").symlink_to("step.py")
    return root
