"""The `stage` fixture: runs on simulated machines, without pauses."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from launch import supervisor
from launch.remote import hosts, queued_resource, supervise
from tests.launch.remote.stage import SshStage, Stage, TpuStage


@pytest.fixture
def stage(request, tmp_path, monkeypatch) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a stage, of each kind in turn."""
    monkeypatch.setattr(supervise, "run_step", lambda job: None)
    monkeypatch.setattr(supervisor, "_PAUSE_S", 0.02)
    monkeypatch.setattr(hosts, "_RETRY_S", 0.05)
    monkeypatch.setattr(queued_resource, "_PAUSE_S", 0.02)
    monkeypatch.setattr(queued_resource, "_ASK_AGAIN_S", 0.02)
    stages: list[Stage] = []

    def make(*starts: object, **more: Any) -> Stage:
        stages.append(request.param(tmp_path, *starts, **more))
        for name, value in stages[-1].environment.items():
            monkeypatch.setenv(name, value)
        return stages[-1]

    yield make
    for stage in stages:
        stage.end()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise `stage` with the kinds that the module names in STAGES, or all."""
    if "stage" in metafunc.fixturenames:
        kinds = getattr(metafunc.module, "STAGES", (SshStage, TpuStage))
        ids = [kind.kind for kind in kinds]
        metafunc.parametrize("stage", kinds, ids=ids, indirect=True)
