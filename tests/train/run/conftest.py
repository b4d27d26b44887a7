"""These fixtures save checkpoints and take leases, and close them after each test."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from etils import epath

from tests.train.run.owners import NEVER_S, Process
from tests.train.run.states import make_state
from train.config import CheckpointConfig
from train.run.checkpoint import Checkpoints
from train.run.lease import Lease, take_lease

ABOUT = {"config": "data: {document_start: true}\n"}


class Clocks:
    """Replace the time module by a true time and a clock that may be off."""

    now = skew = 0.0

    def time(self) -> float:
        return 2000.0 + self.now + self.skew

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> epath.Path:
    return epath.Path(tmp_path / "checkpoints")


@pytest.fixture
def saved(folder):
    """Return a function that opens `folder` for a run and saves some steps."""
    all_checkpoints = []

    def saved(
        *steps: int, path: epath.Path = folder, run_id: str | None = None, **config
    ) -> Checkpoints:
        checkpoints = Checkpoints(path, CheckpointConfig(**config), run_id=run_id)
        all_checkpoints.append(checkpoints)
        for step in steps:
            checkpoints.save(step, make_state(step), ABOUT)
        checkpoints.wait()
        return checkpoints

    yield saved
    for checkpoints in all_checkpoints:
        checkpoints.close()


@pytest.fixture
def start() -> Iterator:
    """Return a function that starts a process and sends it commands."""
    with contextlib.ExitStack() as stack:

        def start(folder, *commands, machine="", times=(0.05, NEVER_S)) -> Process:
            process = Process(folder, machine=machine, times=times)
            stack.callback(process.popen.wait)
            stack.callback(process.popen.kill)
            process.tell(*commands)
            return process

        yield start


@pytest.fixture
def take() -> Iterator:
    """Return a function that takes a lease for this process.

    The attribute `lost` of the lease lists the messages about its loss.
    """
    with contextlib.ExitStack() as stack:

        def take(folder, times=(0.05, NEVER_S)) -> Lease:
            lost: list[str] = []
            lease = take_lease(str(folder), *times, lost.append)
            stack.callback(lease.close)
            lease.lost = lost  # pyright: ignore
            return lease

        yield take


@pytest.fixture
def run(tmp_path) -> Path:
    return tmp_path / "run"
