"""A command on a run chooses a mesh for the devices of this machine."""

from unittest import mock

import jax
import pytest

from model.choices import Attention
from train.config import MESH_AXES
from train.errors import ConfigError
from train.hardware import devices
from train.hardware.targets import parse_target
from train.load_run import make_program_here, with_microbatches


@pytest.mark.parametrize(
    ("typed", "sizes"),
    [
        (("mesh=single", "data.batch_size=6"), {"fsdp": 2}),
        (("mesh.fsdp=16", "data.batch_size=16"), {"fsdp": 8}),
        (("mesh.fsdp=4", "mesh.tensor=2"), {"fsdp": 4, "tensor": 2}),  # it fits
        (("mesh.pipeline=2", "mesh.fsdp=4"), {"fsdp": 8}),
    ],
)
def test_the_runs_mesh_is_kept_if_it_fits(configure, typed, sizes):
    assert len(jax.devices()) == 8
    program = make_program_here(configure(["model.vocab_size=512", *typed]))
    assert dict(program.mesh.shape) == dict.fromkeys(MESH_AXES, 1) | sizes


@pytest.mark.parametrize(
    ("target", "typed", "attention", "compute"),
    [
        (None, ("model.attention=splash",), Attention.xla, "float32"),
        ("a100-2", ("model.compute_dtype=float8",), Attention.cudnn, "bfloat16"),
    ],
)
def test_a_setting_that_the_devices_lack_is_replaced_with_a_warning(
    configure, monkeypatch, caplog, target, typed, attention, compute
):
    """The kernel of these devices, or one that runs on all, replaces the setting."""
    config = configure(["model.vocab_size=512", *typed])
    if target:
        with mock.patch.object(devices, "missing_compiler", return_value="none"):
            target_devices = devices.fake_devices(parse_target(target))
        monkeypatch.setattr(jax, "devices", lambda: target_devices)
    execution = make_program_here(config).execution
    assert execution.attention.kernel is attention
    assert execution.numerics.compute_dtype == compute
    assert execution.numerics.quantization is None
    messages = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any(f"{typed[0]} is not possible on these" in text for text in messages)


@pytest.mark.parametrize(
    ("typed", "count", "wanted", "parts"),
    [((), 1, 4, 4), ((), 1, 3, 1), (("mesh.fsdp=4",), 4, 8, 2)],
)
def test_a_batch_is_split_into_the_microbatches_of_the_run(
    programs, typed, count, wanted, parts
):
    """There are fewer microbatches if a device would otherwise lack rows of one."""
    program = with_microbatches(programs(typed, devices=count), wanted)
    assert program.config.train.accumulation_steps == parts


def test_a_config_that_fits_no_device_is_an_error(configure):
    with pytest.raises(ConfigError):
        make_program_here(configure(["mesh.params.mlp=[fsdp,tensor,fsdp]"]))
