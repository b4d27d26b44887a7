"""Padding of arrays, and what a layer keeps."""

import math

import pytest

from train.plan.estimated.local_step import local_step
from train.plan.estimated.temporaries import saved_bytes, tiled

F32 = 4


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        ((8, 128), 8 * 128),
        ((3, 130), 4 * 256),  # few rows take a smaller tile
        ((9, 128), 16 * 128),
        ((1024, 12, 64), 1024 * 12 * 64),  # the longest dim may be the minor one
        ((5, 7), 8 * 128),
        ((300,), 300),
    ],
)
def test_tiles_pad_the_two_minor_dims(shape, padded):
    assert tiled(shape, F32, "tpu") == F32 * padded
    assert tiled(shape, F32, "gpu") == F32 * math.prod(shape)


def test_full_recomputation_keeps_the_inputs_of_the_layers(programs):
    program = programs("train.remat=full")
    model, (rows, length) = program.config.model, program.batch.inputs.shape
    inputs = model.num_layers * rows * length * model.embed_dim
    width = program.how.activation_dtype.itemsize
    assert saved_bytes(local_step(program)) * program.mesh.size == inputs * width
