"""Stages without pauses."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launch import supervisor
from launch.remote import hosts, queued_resource, supervise
from tests.launch.remote.stage import SshStage, Stage, TpuStage


@pytest.fixture
def stage(request, tmp_path, monkeypatch) -> Iterator[Callable[..., Any]]:
    """Make a stage; of either kind, unless a test says of which."""
    monkeypatch.setattr(supervise, "run_step", lambda job: None)
    monkeypatch.setattr(supervisor, "_PAUSE_S", 0.02)
    monkeypatch.setattr(hosts, "_RETRY_S", 0.05)
    monkeypatch.setattr(queued_resource, "_PAUSE_S", 0.02)
    monkeypatch.setattr(queued_resource, "_ASK_AGAIN_S", 0.02)
    made: list[Stage] = []

    def make(*starts: object, **more: Any) -> Stage:
        made.append(request.param(tmp_path, *starts, **more))
        for name, value in made[-1].environment.items():
            monkeypatch.setenv(name, value)
        return made[-1]

    yield make
    for stage in made:
        stage.end()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Which stages a test plays on: those of its module."""
    if "stage" in metafunc.fixturenames:
        kinds = getattr(metafunc.module, "STAGES", (SshStage, TpuStage))
        ids = [kind.kind for kind in kinds]
        metafunc.parametrize("stage", kinds, ids=ids, indirect=True)
