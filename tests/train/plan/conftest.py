"""Programs are laid out on absent devices."""

from collections.abc import Callable

import pytest

from train.config import Config
from train.core.program import Program, make_program
from train.hardware import devices
from train.hardware.targets import parse_target


@pytest.fixture
def lay_out(monkeypatch: pytest.MonkeyPatch) -> Callable[[Config, str], Program]:
    """Lay a config out on stand-ins for a target's devices; no compiler is needed."""
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)

    def lay_out(config: Config, target: str) -> Program:
        return make_program(config, devices.fake_devices(parse_target(target)))

    return lay_out
