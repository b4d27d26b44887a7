"""Give all tests the same machine: eight virtual CPU devices, and empty caches.

JAX reads its settings when it is imported, so this module sets them before it imports
JAX.

The processes that tests start share a compilation cache, which is empty when pytest
starts, so they compile each program once. A test that needs a cold cache sets
JAX_COMPILATION_CACHE_DIR for its processes. The test process itself uses no cache: it
compiles hardly anything twice, so writing would cost it more (6% of its time) than
reading saves.
"""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# JAX refuses a number of devices that is set in two places.
os.environ["XLA_FLAGS"] = " ".join(
    flag
    for flag in os.environ.get("XLA_FLAGS", "").split()
    if "xla_force_host_platform_device_count" not in flag
)
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
import jax  # the settings below are for other processes

from data.program import PREFIX
from tests.fleet import STARTED, with_quick

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit these
    CACHES = tempfile.mkdtemp(prefix="longhaul-tests-")
    atexit.register(shutil.rmtree, CACHES, ignore_errors=True)
    os.environ["XDG_CACHE_HOME"] = CACHES
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{CACHES}/xla"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# Processes inherit the signals that were ignored when the tests were started (nohup,
# `&`), and a shell cannot trap such a signal: a process that waits for one would wait
# for ever.
for signal_number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(signal_number) is signal.SIG_IGN:
        signal.signal(signal_number, signal.SIG_DFL)

# Turn off most optimizations of LLVM and XLA: otherwise half of the tests' time is
# compilation. The default run of `.ci/run` compiles as users do. The processes of a
# Fleet compile as the tests do.
jax.config.update("jax_disable_most_optimizations", True)
flags = os.environ["XLA_FLAGS"]
os.environ["XLA_FLAGS"] = with_quick(flags)
jax.devices()  # reads the flags
os.environ["XLA_FLAGS"] = flags

# Check the shapes and dtypes in the signatures of the mathematics at every call.
CHECKED = ("model", "train.core.loss", "train.core.step", "train.core.eval_step")
CHECKED += ("train.core.router_balance",)
install_import_hook([PREFIX + module for module in CHECKED], "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow tests of promises first: they often wait while other tests compute."""
    items.sort(key=lambda item: item.get_closest_marker("promise") is None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: a long run may be stopped before its end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nfailed: {report.nodeid}\n{report.longreprtext[-2000:]}", flush=True)


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """End the processes that a failed test left: they would slow all other tests."""
    yield
    while STARTED:
        STARTED.pop().end()


@pytest.fixture(autouse=True)
def few_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget compiled programs after a slow test if there are many.

    XLA:CPU maps about a thousand regions of memory for each large program, and Linux
    allows a process 65,530 regions (vm.max_map_count). A compilation that needs more
    dies.
    """
    yield
    maps = Path("/proc/self/maps")
    if not request.node.get_closest_marker("slow") or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture
def strict() -> Iterator[None]:
    """Raise an error if a dim or a dtype is promoted silently."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def composed() -> Callable:
    """Compose `python -m train <overrides>`, with a vocabulary of 384 if none is set.

    composed(overrides) -> Config
    """
    from train.cli.command import compose
    from train.config import Config
    from train.resolve.program import settle

    def composed(overrides: Sequence[str] = ()) -> Config:
        return settle(compose(overrides), vocab_size=384)

    return composed


class Server:
    """A server that speaks S3. It can go away, and come back with its files."""

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
    """Start one server for all tests: a client never forgets its server's address."""
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
        "AWS_MAX_ATTEMPTS": "6",  # about 15 s
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        run_folder("s3://bucket")  # configures how all clients list files
        fsspec.filesystem("s3").mkdir("bucket")
        yield server
    server.leave()


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """Run a Slurm of two nodes on this machine; yield the variable that locates it."""
    from tests.slurm import loopback

    with loopback() as variables:
        yield variables


@pytest.fixture(scope="session")
def bucket(server: Server) -> Any:
    """Return the file system of the server."""
    import fsspec

    return fsspec.filesystem("s3")
