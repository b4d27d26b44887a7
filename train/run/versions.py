"""Which code this is: the libraries, and this program itself."""

import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "longhaul")


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of packages: by default, of what decides what a step does."""
    numbers = {}
    for package in packages:
        try:
            numbers[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            numbers[package] = "not installed"
    return numbers


def code_version() -> str:
    """Hash this program's own source files."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in ("data", "model", "train"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
