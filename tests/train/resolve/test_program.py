"""A settled config becomes a program; test_meshes.py tries other meshes."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from data.config import DataConfig
from model.choices import Position
from model.config import ModelConfig
from tests.train.conftest import CUBE, losses_of
from train.config import Config
from train.errors import ConfigError
from train.resolve.program import settle


@pytest.fixture(scope="module")
def born(programs):
    """Return the state of step 0 from one device, on the host."""
    return jax.device_get(programs(devices=1).init())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("optimizer=muon",),
        ("optimizer=muon_rms", "optimizer.muon_per_head=true"),
    ],
)
def test_losses_of_muon_do_not_depend_on_the_mesh(programs, store, born, options):
    """Sharded matrices are orthogonalized whole."""
    one_device = programs(options, devices=1)
    state = born._replace(optimizer=one_device.optimizer.init(born.params))
    state = jax.device_get(state)
    expected = losses_of(one_device, store, state, 10)
    sharded = programs([*options, *CUBE], devices=8)
    np.testing.assert_allclose(
        losses_of(sharded, store, state, 10), expected, rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor", "lion"])
def test_losses_with_random_rounding_do_not_depend_on_the_mesh(
    programs, store, optimizer
):
    """Entries differ only if the last bit of a gradient changes a rounding."""
    overrides = f"optimizer={optimizer}", "model.param_dtype=bfloat16"
    if optimizer != "adafactor":
        overrides += ("optimizer.moment_dtype=int8",)
    one_device = programs(overrides, devices=1)
    cube = programs([*overrides, *CUBE], devices=8)
    state = jax.device_get(one_device.init())
    expected = losses_of(one_device, store, state, 10)
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(losses_of(cube, store, state, 10), expected, rtol=1e-3)


def test_the_first_state_does_not_depend_on_the_mesh(programs, born):
    state = programs(CUBE, devices=8).init()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), born)


def test_the_step_on_a_cpu_copies_no_part_of_the_state(programs):
    """Donated buffers are written in place (compiler_options of train/core/runtime)."""
    program = programs(["mesh.data=2"], devices=2)
    step = program.train_step.lower(program.state, program.batch).compile()
    assert not re.findall(r"= f32.* copy\(%?param.*", step.as_text())


def test_settle_takes_vocabulary_and_length_from_the_data():
    data = DataConfig(sequence_length=32)
    learned = ModelConfig(position=Position.learned)
    model = settle(Config(data=data, model=learned), 384).model
    assert (model.vocab_size, model.max_sequence_length) == (384, 32)
    assert settle(Config(data=data), 384).model.max_sequence_length is None
    model = replace(learned, vocab_size=512, max_sequence_length=64)
    config = Config(data=data, model=model)
    assert settle(config, 384) == config


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    """The padding may be smaller than ours: 257 ids fit in a vocabulary of 257."""
    config = Config(model=ModelConfig(vocab_size=257))
    assert settle(config, 384, 257).model.vocab_size == 257
    with pytest.raises(ConfigError, match=r"vocab_size = 257\n.*the 258 tokens"):
        settle(config, 384, 258)


def test_all_that_does_not_fit_the_devices_is_listed_at_once(programs):
    shape = ("model.attention=splash", "model.embed_dim=36", "data.batch_size=6")
    with pytest.raises(ConfigError) as error:
        programs([*shape, "mesh.fsdp=8"], devices=8)
    keys = {mistake.key for mistake in error.value.mistakes}
    assert keys == {"model.attention", "data.batch_size", "mesh.params.embed"}


def test_no_activation_is_replicated_to_change_its_sharding(programs, capfd):
    """Rows of tables W[V, D_fsdp] become x[B_(data, fsdp), T, D]."""
    program = programs([*CUBE, "model.position=learned"], devices=8)
    program.train_step.lower(program.state, program.batch).compile()
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
