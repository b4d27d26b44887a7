"""Fixture: a git checkout from which an archive of the code is made."""

import subprocess
from pathlib import Path

import pytest


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a small program in git, next to files that must not be packed."""
    root = tmp_path / "checkout"
    files = {
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
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "all")
    (root / "train/step.py").write_text("new = 2\n")
    (root / "train/moe.py").write_text("experts = 8\n")
    (root / "train/gone.py").unlink()
    for name in (
        *("train/__pycache__/step.pyc", "train/.env", "runs/base/config.yaml"),
        *("configs/mine.yaml", "configs/.secret.yaml", "key.json", "train/key.json"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("secret")
    (tmp_path / "outside.py").write_text("secret")
    (root / "train/link.py").symlink_to(tmp_path / "outside.py")
    (root / "train/same.py").symlink_to("step.py")
    return root
