"""Which code this is: the libraries, and this program itself."""

import hashlib
import importlib.metadata
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "longhaul")


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide what a step computes."""
    numbers = {}
    for package in PACKAGES:
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
