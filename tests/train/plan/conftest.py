"""Programs are laid out on absent devices."""

from collections.abc import Callable

import pytest

from train.config import Config
from train.hardware import devices
from train.hardware.targets import parse_target
from train.resolve.program import ConfiguredProgram, make_program


@pytest.fixture
def lay_out(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Config, str], ConfiguredProgram]:
    """Lay a config out on stand-ins for a target's devices; no compiler is needed."""
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)

    def lay_out(config: Config, target: str) -> ConfiguredProgram:
        return make_program(config, devices.fake_devices(parse_target(target)))

    return lay_out
