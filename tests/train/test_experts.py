"""Experts on a mesh train as on one device; test_meshes.py has other meshes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.batches import Order
from data.rows import padding_batch
from tests.train.conftest import MOE as PLAIN
from tests.train.conftest import distance, take_steps
from train.config import MESH_AXES
from train.core.router_balance import balance_experts
from train.errors import ConfigError
from train.resolve.execution import ExecutionChoice

MOE = (
    *(*PLAIN, "model.router_aux_weight=0.1", "model.router_z_weight=0.01"),
    *("model.bias=true", "model.activation=clamped_swiglu"),
)
SENT = "mesh.expert_exchange=ragged"
IN_PIECES = "mesh.expert_exchange=all_to_all"
FORCED = {
    "choice": None,
    "one device's": [9.0] * 3 + [0.0] * 5,
    "none": [-9.0] + [0.0] * 7,
}


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(("mesh.expert=8",), marks=pytest.mark.slow),
        pytest.param(
            ("mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2", "train.remat=dots"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2", SENT),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("mesh.fsdp=2", "mesh.expert=4", "train.remat=full", SENT),
            marks=pytest.mark.slow,
        ),
        pytest.param(("mesh.expert=8", SENT), marks=pytest.mark.slow),
        pytest.param(
            ("mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2", IN_PIECES),
            marks=pytest.mark.slow,
        ),
        ("mesh.fsdp=2", "mesh.expert=4", "train.remat=full", IN_PIECES),
    ],
    ids=" ".join,
)
def test_gradients_are_those_of_one_device(gradients, mesh):
    """They are equal even if one device gets all tokens, or if one expert gets none."""
    for name, balance in FORCED.items():
        overrides = (*MOE, "mesh=single")
        loss, grads, load = gradients(overrides, balance=balance, devices=1)
        assert load.sum() == 8 * 32 * 3
        if name == "one device's":
            assert (load[0] == [256] * 3 + [0] * 5).all()
        if name == "none":
            assert load[0, 0] == 0
        actual = gradients([*MOE, *mesh], balance=balance)
        np.testing.assert_array_equal(actual[2], load)
        assert actual[0] == pytest.approx(loss, rel=1e-5)
        assert distance(actual[1], grads) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [SENT, IN_PIECES])
@pytest.mark.parametrize("expert", [2, 4])
def test_a_token_may_have_many_experts_on_a_device(gradients, expert, exchange):
    """The device has several copies of such a token, or fewer copies than experts."""
    overrides = (*MOE, "model.experts_per_token=6")
    loss, grads, _ = gradients([*overrides, "mesh=single"], devices=1)
    actual = gradients(
        [*overrides, f"mesh.fsdp={8 // expert}", f"mesh.expert={expert}", exchange]
    )
    assert actual[0] == pytest.approx(loss, rel=1e-5)
    assert distance(actual[1], grads) < 1e-5


@pytest.mark.parametrize(
    ("platform", "devices", "asked", "found"),
    [
        ("tpu", 2, "auto", "all_gather"),  # a token has three experts
        ("tpu", 4, "auto", "ragged"),
        ("cpu", 4, "auto", "all_gather"),
        ("gpu", 2, "auto", "all_gather"),
        ("gpu", 4, "auto", "all_to_all"),
        ("cpu", 2, "ragged", "ragged"),
        ("tpu", 4, "all_gather", "all_gather"),
    ],
)
def test_the_exchange_that_sends_less_is_chosen(
    configure, platform, devices, asked, found
):
    config = configure([*MOE, "model.attention=xla", f"mesh.expert_exchange={asked}"])
    sizes = dict.fromkeys(MESH_AXES, 1) | {"expert": devices}
    device = SimpleNamespace(platform=platform, device_kind="")
    execution = ExecutionChoice(config, device, sizes).execution()
    assert execution.expert_exchange == found


@pytest.mark.parametrize(("fsdp", "found"), [(4, "ragged"), (8, "all_gather")])
def test_a_large_slice_of_v5e_gathers_tokens(configure, fsdp, found):
    sizes = dict.fromkeys(MESH_AXES, 1) | {"expert": 4, "fsdp": fsdp}
    device = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    config = configure([*MOE, "model.attention=xla"])
    assert ExecutionChoice(config, device, sizes).execution().expert_exchange == found


def test_ragged_exchange_needs_small_slices_of_v5e(configure):
    sizes = dict.fromkeys(MESH_AXES, 1) | {"expert": 4, "data": 8}
    device = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    config = configure([*MOE, SENT, "model.attention=xla"])
    with pytest.raises(ConfigError, match="expert_exchange=auto"):
        ExecutionChoice(config, device, sizes).execution()
    config = configure([*MOE, SENT, "model.attention=xla", "mesh.dcn.data=2"])
    execution = ExecutionChoice(config, device, sizes).execution()
    assert execution.expert_exchange == "ragged"


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        (("mesh.expert=4", "mesh.data=2", "model.num_experts=6"), "experts"),
        (("mesh.expert=8", "data.batch_size=12"), "data.batch_size"),
    ],
)
def test_sizes_that_a_mesh_of_experts_cannot_divide_are_refused(programs, changed, key):
    with pytest.raises(ConfigError, match=key):
        programs([*MOE, *changed], devices=8)


def test_the_bias_of_an_expert_with_too_few_tokens_grows(programs):
    config = programs(MOE, devices=1).config.model

    def slot() -> dict:
        return {"mlp": {"router": {"balance": jnp.zeros((1, 4))}}}

    dense = {"mlp": {}}
    pattern = {"0": slot(), "1": dense, "2": slot()}
    params = {"layers": {"0": {"0": dense}, "1": pattern}}
    load = jnp.asarray([[0.0, 8.0, 4.0, 4.0], [4.0, 4.0, 8.0, 0.0]])
    layers = balance_experts(params, load, jnp.bool_(True), config)["layers"]["1"]
    for name, expected in (("0", [[1, -1, 0, 0]]), ("2", [[0, 0, -1, 1]])):
        actual = layers[name]["mlp"]["router"]["balance"]
        expected_bias = np.float32(expected) * config.router_bias_rate
        np.testing.assert_array_equal(actual, expected_bias)


@pytest.mark.slow
def test_a_step_moves_the_bias_and_no_optimizer_does(programs, store):
    program = programs(MOE, devices=1)
    state, (metrics,) = take_steps(program, store, program.init(), 1)
    bias = jax.device_get(state.params["layers"]["1"]["0"]["mlp"]["router"]["balance"])
    rate = np.float32(program.config.model.router_bias_rate)
    assert set(np.abs(bias).ravel()) <= {rate, np.float32(0)}
    assert bias.any()
    assert metrics["expert_load"].shape == (1,)
    assert metrics["expert_load"][0] > 1


PADDED = "data.sequence_length=96"
NO_AUX = ("model.router_aux_weight=0",)


def with_padding(batch, lengths):
    """Return rows of 96 positions, which begin with the first positions of a batch."""
    padded = padding_batch(len(lengths), 96)
    for row, length in enumerate(lengths):
        for field, values in zip(padded, batch, strict=True):
            field[row, :length] = values[row, :length]
    return padded


@pytest.fixture(scope="module")
def short(programs, store):
    return Order(store, programs(MOE, devices=1).config.data, 0).read(0)


def test_padding_balances_no_expert(gradients, short):
    """Load, auxiliary loss, z-loss and their gradients are those without padding."""
    loss, grads, load = gradients(MOE, devices=1, batch=short)
    batch = with_padding(short, [32] * 8)
    actual = gradients([*MOE, PADDED], devices=1, batch=batch)
    np.testing.assert_array_equal(actual[2], load)
    assert actual[0] == pytest.approx(loss, rel=1e-6)
    assert distance(actual[1], grads) < 1e-5


@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.data=2", "mesh.fsdp=4"),
        pytest.param(
            ("mesh.data=2", "mesh.context=2", "mesh.expert=2"), marks=pytest.mark.slow
        ),
        pytest.param(
            ("mesh.pipeline=2", "mesh.data=4", "model.dense_layers=0", *NO_AUX),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("train.accumulation_steps=2", "mesh.data=4", "mesh.tensor=2", *NO_AUX),
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_devices_with_unequal_padding_balance_as_one_does(gradients, short, mesh):
    """Each microbatch has its own load loss, so cases with several omit it."""
    batch = with_padding(short, [32, 32, 32, 5, 1, 0, 0, 30])
    model_overrides = [word for word in mesh if word.startswith("model.")]
    loss, grads, load = gradients(
        [*MOE, PADDED, *model_overrides], devices=1, batch=batch
    )
    actual = gradients([*MOE, PADDED, *mesh], devices=8, batch=batch)
    np.testing.assert_array_equal(actual[2], load)
    assert (load.sum(axis=1) == 3 * sum([32, 32, 32, 5, 1, 0, 0, 30])).all()
    assert actual[0] == pytest.approx(loss, rel=1e-5)
    assert distance(actual[1], grads) < 1e-5
