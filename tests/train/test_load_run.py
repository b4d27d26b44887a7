"""A command on a run brings its own mesh for the devices that are here."""

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
    program = make_program_here(configure("model.vocab_size=512", *typed))
    assert dict(program.mesh.shape) == dict.fromkeys(MESH_AXES, 1) | sizes


@pytest.mark.parametrize(
    ("target", "typed", "attention", "compute"),
    [
        (None, ("model.attention=splash",), Attention.xla, "float32"),
        ("a100-2", ("model.compute_dtype=float8",), Attention.cudnn, "bfloat16"),
    ],
)
def test_what_the_devices_lack_gives_way_loudly(
    configure, monkeypatch, caplog, target, typed, attention, compute
):
    """To the kernel that is theirs, or to one that any have."""
    config = configure("model.vocab_size=512", *typed)
    if target:
        with mock.patch.object(devices, "missing_compiler", return_value="none"):
            there = devices.fake_devices(parse_target(target))
        monkeypatch.setattr(jax, "devices", lambda: there)
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
def test_a_batch_goes_through_in_the_runs_microbatches(
    programs, typed, count, wanted, parts
):
    """As far as rows of it are left for each device."""
    program = with_microbatches(programs(*typed, devices=count), wanted)
    assert program.config.train.accumulation_steps == parts


def test_what_fits_on_no_device_is_an_error(configure):
    with pytest.raises(ConfigError):
        make_program_here(configure("mesh.params.mlp=[fsdp,tensor,fsdp]"))
