"""Linear layers that multiply eight bits train the same on any mesh."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.batches import Order
from model.choices import Attention, ComputeDtype
from model.config import ModelConfig
from model.parts.eight_bits.recipes import RECIPES
from tests.train.conftest import CUBE, take_steps
from train.config import MESH_AXES
from train.core.feed import place
from train.errors import ConfigError
from train.resolve.execution import ExecutionChoice

SMALL = ("data.batch_size=4", "data.sequence_length=32")
CONTEXT = ("mesh.context=2", "mesh.data=1")
EXPERTS = ("model.mlp=moe", "model.num_experts=4", "model.expert_dim=32")


def train_steps(programs, store, overrides, devices: int = 1, steps: int = 2):
    """Train a few steps; return the losses and a matrix of the first layer."""
    program = programs([*SMALL, *overrides], devices=devices)
    state, metrics = take_steps(program, store, program.init(), steps)
    weight = state.params["layers"]["0"]["0"]["attention"]["query"]["weight"]
    return [float(values["loss"]) for values in metrics], jax.device_get(weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        ("float8", EXPERTS),
        ("float8", ("train.remat=full",)),
        ("int8", ()),
        ("int8", CONTEXT),
    ],
)
def test_a_mesh_changes_nothing_but_the_order_of_sums(programs, store, dtype, more):
    """Random rounding is a function of seed, step and position."""
    dtype = f"model.compute_dtype={dtype}"
    overrides = () if more == CONTEXT else more
    losses, _ = train_steps(programs, store, [dtype, *overrides])
    losses_on_mesh, _ = train_steps(programs, store, [dtype, *CUBE, *more], devices=8)
    # A ring sums in another order, so some values are then rounded the other way.
    rtol = 5e-4 if more == CONTEXT else 1e-4
    np.testing.assert_allclose(losses_on_mesh[0], losses[0], rtol=rtol)
    # In step 2 all sums of another order are rounded; some differ by an eighth. It
    # depends on the processor how many: with experts, losses differed by 0.32 % on one.
    np.testing.assert_allclose(losses_on_mesh, losses, rtol=6e-3)
    plain_losses, _ = train_steps(programs, store, overrides)
    assert plain_losses != losses
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("mesh.fsdp=2", "mesh.tensor=2", "train.remat=full"),
        ("mesh.pipeline=2", "mesh.fsdp=2", "mesh.pipeline_repeats=2"),
    ],
)
def test_layers_that_keep_their_precision_do_so_on_any_mesh(programs, store, more):
    """The precise layers differ by stage. All other layers saturate their scales."""
    common = "model.num_layers=4", "model.compute_dtype=int8"
    common += ("model.high_precision_layers=[first,2]",)
    losses = list[float]()
    for mesh, devices in (((), 1), (more, 4)):
        program = programs([*SMALL, *common, *mesh], devices=devices)
        batch = place(Order(store, program.config.data, 0).read(0), program.batch)
        _, metrics = program.watched_step(program.init(), batch)
        saturated = metrics["numerics/saturated"] > 0
        assert saturated.tolist() == [False, True, False, True]
        losses.append(float(metrics["loss"]))
    # Some values round the other way.
    assert losses[1] == pytest.approx(losses[0], rel=5e-4)


@pytest.mark.slow
def test_random_rounding_follows_the_seed_and_the_step_alone(programs, store):
    """A stopped run continues as if it had not stopped."""
    int8 = "model.compute_dtype=int8"
    _, weight = train_steps(programs, store, [int8], steps=1)
    _, same_weight = train_steps(programs, store, [int8], steps=1)
    np.testing.assert_array_equal(weight, same_weight)
    program = programs([*SMALL, int8])
    batch = place(Order(store, program.config.data, 0).read(0), program.batch)
    first, later = (
        program.train_step(program.init()._replace(step=jnp.int32(step)), batch)[1]
        for step in (0, 1)
    )
    assert first["loss"] == later["loss"], "the forward pass rounds to the nearest"
    assert first["grad_norm"] != later["grad_norm"]


@pytest.mark.parametrize(
    ("kind", "platform", "dtype", "instead"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", "float8", None),
        ("NVIDIA A100-SXM4-80GB", "gpu", "float8", "set bfloat16"),
        ("NVIDIA H100 80GB HBM3", "gpu", "int8", "set bfloat16 or float8"),
        ("some GPU", "gpu", "float8", "set bfloat16"),
        ("TPU v5 lite", "tpu", "int8", None),
        ("TPU v5 lite", "tpu", "float8", "set bfloat16 or int8"),
        ("TPU v4", "tpu", "int8", "set bfloat16"),
        ("TPU7x", "tpu", "float8", None),
    ],
)
def test_a_chip_that_gains_nothing_refuses_eight_bits(
    composed, kind, platform, dtype, instead
):
    device: Any = SimpleNamespace(platform=platform, device_kind=kind)
    model = ModelConfig(compute_dtype=ComputeDtype(dtype), attention=Attention.xla)
    config = replace(composed(["mesh=ddp"]), model=model)
    sizes = dict.fromkeys(MESH_AXES, 1)
    if instead:
        with pytest.raises(ConfigError) as error:
            ExecutionChoice(config, device, sizes).execution()
        (mistake,) = error.value.mistakes
        assert mistake.key == "model.compute_dtype"
        assert mistake.rule.endswith(instead)
        return
    numerics = ExecutionChoice(config, device, sizes).execution().numerics
    assert numerics.quantization == RECIPES[ComputeDtype(dtype)]()
    assert numerics.compute_dtype == numerics.activation_dtype == jnp.bfloat16
    experts = numerics.quantization if platform == "gpu" else None
    assert numerics.expert_quantization == experts
