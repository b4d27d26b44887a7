"""One machine for all tests: eight virtual CPU devices, and caches of their own.

JAX reads its settings when it is imported, so they stand before every import of it.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# JAX refuses to be told the number twice.
os.environ["XLA_FLAGS"] = " ".join(
    flag
    for flag in os.environ.get("XLA_FLAGS", "").split()
    if "xla_force_host_platform_device_count" not in flag
)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="longhaul-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def composed() -> Callable:
    """Compose `python -m train <overrides>`, with a vocabulary of 384 if none is set.

    composed(*overrides) -> Config
    """
    from train.command import compose
    from train.config import Config
    from train.program import settle

    def composed(*overrides: str) -> Config:
        return settle(compose(overrides), vocab_size=384)

    return composed
