"""A command on a run brings its own mesh for the devices that are here."""

import jax
import pytest

from train.config import MESH_AXES
from train.errors import ConfigError
from train.load_run import in_microbatches, make_program_here


@pytest.mark.parametrize(
    ("typed", "sizes"),
    [
        (("mesh=single",), {"fsdp": 8}),
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
    ("typed", "count", "wanted", "parts"),
    [((), 1, 4, 4), ((), 1, 3, 1), (("mesh.fsdp=4",), 4, 8, 2)],
)
def test_a_batch_goes_through_in_the_runs_microbatches(
    programs, typed, count, wanted, parts
):
    """As far as rows of it are left for each device."""
    program = in_microbatches(programs(*typed, devices=count), wanted)
    assert program.config.train.accumulation_steps == parts


def test_what_fits_on_no_device_is_an_error(configure):
    with pytest.raises(ConfigError):
        make_program_here(configure("model.vocab_size=512", "model.attention=cudnn"))
