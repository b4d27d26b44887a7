"""One machine for all tests: eight virtual CPU devices, and caches of their own.

JAX reads its settings when it is imported, so they stand before every import of it.

What processes compile that tests start is compiled once a run of pytest: all share a
cache, empty at first. A test that needs a cold one sets JAX_COMPILATION_CACHE_DIR for
its processes. Tests themselves compile hardly anything twice, so that writing costs
them more (6% of their time) than reading saves.
"""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# JAX refuses to be told the number twice.
os.environ["XLA_FLAGS"] = " ".join(
    flag
    for flag in os.environ.get("XLA_FLAGS", "").split()
    if "xla_force_host_platform_device_count" not in flag
)
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
import jax  # here, for what follows is for other processes

from tests.fleet import STARTED, with_quick

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit these
    CACHES = tempfile.mkdtemp(prefix="longhaul-tests-")
    atexit.register(shutil.rmtree, CACHES, ignore_errors=True)
    os.environ["XDG_CACHE_HOME"] = CACHES
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{CACHES}/xla"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# Processes inherit what was ignored when the tests were started (nohup, `&`), and a
# shell cannot even trap that: what waits for a signal would wait for ever.
for ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)

# Spare what LLVM and XLA do for speed: half of the tests' time was compiling. The
# default run of `.ci/run` compiles as users do; of the processes that tests start those
# of a Fleet do not.
jax.config.update("jax_disable_most_optimizations", True)
flags = os.environ["XLA_FLAGS"]
os.environ["XLA_FLAGS"] = with_quick(flags)
jax.devices()  # reads them
os.environ["XLA_FLAGS"] = flags

# The shapes and dtypes in the signatures of the mathematics hold at every call.
STEPS = ("train.core.step", "train.core.eval_step", "train.core.router_balance")
install_import_hook(["model", "train.core.loss", *STEPS], "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slow tests of promises first: they often wait, while others compute."""
    items.sort(key=lambda item: item.get_closest_marker("promise") is None)


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """End what a test that failed left running: it would go on beside all others."""
    yield
    while STARTED:
        STARTED.pop().end()


@pytest.fixture(autouse=True)
def few_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget compiled programs behind a slow test once they are many.

    XLA:CPU maps about a thousand regions of memory for each large one, and Linux allows
    a process 65,530 (vm.max_map_count): a compilation dies of one more.
    """
    yield
    maps = Path("/proc/self/maps")
    if not request.node.get_closest_marker("slow") or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture
def strict() -> Iterator[None]:
    """No dim and no dtype is promoted silently."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def composed() -> Callable:
    """Compose `python -m train <overrides>`, with a vocabulary of 384 if none is set.

    composed(*overrides) -> Config
    """
    from train.cli.command import compose
    from train.config import Config
    from train.core.program import settle

    def composed(*overrides: str) -> Config:
        return settle(compose(overrides), vocab_size=384)

    return composed


class Server:
    """A server that speaks S3; it can go away, and come back with what it had."""

    def __init__(self, start: Callable[..., Any]):
        self._start = start
        self.port = 0
        self.come_back()

    def leave(self) -> None:
        self._now.stop()

    def come_back(self) -> None:
        self._now = self._start("127.0.0.1", self.port, verbose=False)
        self._now.start()
        _, self.port = self._now.get_host_and_port()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One for all tests: clients are kept for good, with their server's address."""
    from train.run.folder import run_folder

    moto = pytest.importorskip("moto.server")
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs")
    server = Server(moto.ThreadedMotoServer)
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "6",  # patience of some 15 s
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        run_folder("s3://bucket")  # settles how all clients list
        fsspec.filesystem("s3").mkdir("bucket")
        yield server
    server.leave()


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """Run a Slurm of two nodes on this machine; give the variable that finds it."""
    from tests.slurm import loopback

    with loopback() as found:
        yield found


@pytest.fixture(scope="session")
def bucket(server: Server) -> Any:
    """Its files."""
    import fsspec

    return fsspec.filesystem("s3")
