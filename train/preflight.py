"""What must be the same on all processes of a run, in a few words each."""

import hashlib
import importlib.metadata
import json
import platform
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import jax

from data.sources import Sources
from train.config import Config, DistributedConfig

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "longhaul")


def about_program(config: Config) -> dict[str, str]:
    """Give the hashes of config and code, and the libraries' versions."""
    same = replace(config, distributed=DistributedConfig())  # the process' own number
    text = json.dumps(asdict(same), sort_keys=True, default=str)
    found = {"config": _short(text.encode()), "code": code_version()}
    return found | {"Python": platform.python_version()} | versions()


def about_devices() -> dict[str, str]:
    """Give kinds and number of this process' devices."""
    kinds = Counter(device.device_kind for device in jax.local_devices())
    return {"devices": ", ".join(f"{n} x {kind}" for kind, n in kinds.items())}


def about_data(sources: Sources) -> dict[str, str]:
    """Give the fingerprint of each source."""
    return {f"data {name}": str(at) for name, at in sources.fingerprints.items()}


def versions() -> dict[str, str]:
    """Give the versions of the libraries that decide what a step computes."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def code_version() -> str:
    """Hash this program's own source files."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for package in ("data", "model", "train"):
        for file in sorted((root / package).glob("*.py")):
            digest.update(f"{package}/{file.name}".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _short(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]
