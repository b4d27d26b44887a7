"""Padding of arrays, and what a layer keeps."""

import math

import jax
import pytest
from train.plan.estimated.temporaries import saved_bytes, temporaries, tiled_bytes

from train.plan.estimated.local_step import local_step

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
    assert tiled_bytes(shape, F32, "tpu") == F32 * padded
    assert tiled_bytes(shape, F32, "gpu") == F32 * math.prod(shape)


def test_full_recomputation_keeps_the_inputs_of_the_layers(programs):
    program = programs("train.remat=full")
    model, (rows, length) = program.config.model, program.batch.inputs.shape
    inputs = model.num_layers * rows * length * model.embed_dim
    width = program.execution.numerics.activation_dtype.itemsize
    assert saved_bytes(local_step(program)) * program.mesh.size == inputs * width


def test_matrices_that_travel_are_there_twice_beside_the_gradients(
    programs, monkeypatch
):
    """Parts of all layers' that are packed, and what became of them."""
    monkeypatch.setattr(
        "train.optimizer.assignment._MAX_BATCH_ENTRIES", 1
    )  # one a round
    small = "data.batch_size=2", "data.sequence_length=16", "model.num_layers=8"
    muon = "optimizer=muon", "mesh.fsdp=2", "train.remat=full"
    program = programs(*small, *muon, devices=2)
    layers = jax.tree.leaves(program.state.params["layers"])
    packed = sum(leaf.size for leaf in layers if leaf.ndim > 2) // 2
    width = program.execution.numerics.compute_dtype.itemsize
    found = temporaries(local_step(program))
    assert found["matrices on the way"] == 2 * packed * width
