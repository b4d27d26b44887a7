"""The versions of the libraries and of this program."""

import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

from data.program import own_file

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "longhaul")


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the version of each package, by default of those that influence a step."""
    version_numbers = {}
    for package in packages:
        try:
            version_numbers[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version_numbers[package] = "not installed"
    return version_numbers


def own_file_version() -> dict[str, str] | None:
    """Return the name and the hash of the user's own file that started this process."""
    file = own_file()
    if file is None:
        return None
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"name": file.name, "sha256": digest}


def code_version() -> str:
    """Return a hash of this program's source files."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in ("data", "model", "train"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
