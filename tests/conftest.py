"""One machine for all tests: eight virtual CPU devices, and caches of their own.

JAX reads its settings when it is imported, so they stand before every import of it.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

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


@pytest.fixture(scope="session")
def bucket() -> Iterator[Any]:
    """A server that speaks S3."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        import fsspec

        fsspec.filesystem("s3").mkdir("bucket")
        yield fsspec.filesystem("s3")
    server.stop()
