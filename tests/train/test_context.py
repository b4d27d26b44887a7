"""Rows that devices share: the same loss and gradients as on one device."""

import jax
import numpy as np
import pytest
from flax import nnx

from data.batches import Batch, Order
from model.attention.across import choose
from model.choices import Attention, ContextAttention
from model.gpt import GPT, params_of
from tests.train.test_experts import distance
from tests.train.test_program import train
from train.errors import ConfigError
from train.step import make_gradients

GROUPED = ("model.num_heads=8", "model.num_kv_heads=4")
MOE = (
    *("model=moe_nano", "model.expert_dim=24", "model.router_aux_weight=0.1"),
    *("model.num_layers=2", "model.num_heads=4", "model.embed_dim=32"),
    *("model.init=scaled", "model.layer_unroll=1", "data.batch_size=8"),
)
RING = "mesh.context_attention=ring"
ULYSSES = "mesh.context_attention=ulysses"
ALL_GATHER = "mesh.context_attention=all_gather"


@pytest.fixture(scope="module")
def batches(programs, store):
    """Rows of short documents; a document ends inside every chunk; one a row."""
    config = programs(*GROUPED, devices=1).config.data
    packed = Order(store, config, 0).read(0)
    assert (packed.segment_ids.max(axis=1) > 1).any()
    T = config.sequence_length
    ends = np.arange(T) // 3 + 1  # chunks of 2, 4 or 8
    every = packed._replace(segment_ids=np.broadcast_to(ends, (8, T)).astype(np.int32))
    one = packed._replace(segment_ids=np.ones((8, T), np.int32))
    return {"packed": packed, "every chunk": every, "one": one}


@pytest.fixture(scope="module")
def gradients(programs):
    """Run one step's gradients: (overrides, batch) -> loss, gradients, load."""
    steps = {}

    def gradients(*overrides, batch: Batch, devices=8):
        program = programs(*overrides, devices=devices)
        if overrides not in steps:
            step = make_gradients(program.model, program.how, program.config.train)
            steps[overrides] = jax.jit(step)
        with jax.set_mesh(program.mesh):
            params = params_of(GPT(program.config.model, nnx.Rngs(1)))
            params = jax.device_put(params, program.shardings.params)
            placed = jax.device_put(batch, program.batch_shardings)
            return jax.device_get(steps[overrides](params, placed))

    return gradients


LOCAL = (
    *("model.window=5", "model.layer_pattern=[local,global]"),
    *("model.attention_soft_cap=2", "model.attention_sinks=true"),
)


def slow(*overrides):
    return pytest.param(overrides, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "mesh",
    [
        slow(RING, "mesh.context=2", "mesh.data=4"),
        slow(RING, "mesh.context=4", "mesh.data=2"),
        slow(RING, "mesh.context=8", "train.remat=full"),
        ("mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2"),
        slow(RING, "mesh.fsdp=2", "mesh.context=4", "train.accumulation_steps=2"),
        slow(RING, "mesh.context=4", "mesh.fsdp=2", "train.remat=[attention]"),
        slow(ULYSSES, "mesh.context=4", "mesh.fsdp=2"),
        slow(ULYSSES, "mesh.context=2", "mesh.tensor=2", "mesh.fsdp=2"),
        slow(ALL_GATHER, "mesh.context=8"),
        slow(ALL_GATHER, "mesh.context=2", "mesh.tensor=2", "mesh.data=2"),
    ],
    ids=" ".join,
)
def test_gradients_are_those_of_one_device(gradients, batches, mesh):
    for batch in batches.values():
        compare(gradients, GROUPED, mesh, batch)


def compare(gradients, model, mesh, batch):
    loss, grads, load = gradients(*model, "mesh=single", batch=batch, devices=1)
    found = gradients(*model, *mesh, batch=batch)
    np.testing.assert_array_equal(found[2], load)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert distance(found[1], grads) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.expert=2", "mesh.context=4"),
        ("mesh.expert=2", "mesh.context=2", "mesh.tensor=2"),
    ],
    ids=" ".join,
)
def test_experts_get_the_tokens_of_all_parts_of_a_row(gradients, batches, mesh):
    compare(gradients, MOE, mesh, batches["packed"])


@pytest.mark.slow
def test_twenty_steps_are_those_of_one_device(programs, store):
    one = programs(*GROUPED, devices=1)
    born = jax.device_get(one.init())
    expected = train(one, store, born)
    shared = programs(*GROUPED, "mesh.fsdp=2", "mesh.context=4", devices=8)
    np.testing.assert_allclose(train(shared, store, born), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("asked", "kernel", "length", "kv_heads", "plain", "answer"),
    [
        ("auto", "splash", 4096, 3, True, "ring"),
        ("auto", "splash", 4096, 8, False, "ulysses"),
        ("auto", "xla", 4096, 3, False, "all_gather"),
        ("auto", "cudnn", 4100, 8, True, "ulysses"),
        ("auto", "splash", 4096, 3, False, "3 key and value heads"),
        ("ring", "splash", 4096 - 128, 8, True, "divisible by 1024, not 3968"),
        ("ring", "xla", 4096, 8, False, "ring has neither model.window"),
        ("ulysses", "xla", 4096, 6, True, "6 key and value heads"),
        ("all_gather", "splash", 4096, 8, True, "needs model.attention=xla"),
    ],
)
def test_what_can_serve_is_taken(asked, kernel, length, kv_heads, plain, answer):
    given = Attention(kernel), 4, length, kv_heads, plain
    if answer in list(ContextAttention):
        assert choose(ContextAttention(asked), *given) == answer
        return
    with pytest.raises(ValueError, match=answer):
        choose(ContextAttention(asked), *given)


def test_rows_that_cannot_be_cut_are_refused(programs):
    with pytest.raises(ConfigError, match=r"mesh\.context_attention") as error:
        programs("data.sequence_length=20", "mesh.context=8", devices=8)
    assert "data.sequence_length divisible by 16, not 20" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        (ULYSSES, "mesh.context=2", "mesh.tensor=2", "mesh.fsdp=2"),
        (ALL_GATHER, "mesh.context=4", "mesh.tensor=2"),
        ("mesh.fsdp=4", "mesh.tensor=2"),
    ],
    ids=" ".join,
)
def test_windows_caps_and_sinks_are_those_of_one_device(gradients, batches, mesh):
    own, batch = (*GROUPED, *LOCAL), batches["packed"]
    loss, grads, _ = gradients(*own, "mesh=single", batch=batch, devices=1)
    found = gradients(*own, *mesh, batch=batch)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert distance(found[1], grads) < 1e-5


@pytest.mark.parametrize("override", ["model.window=5", "model.attention_sinks=true"])
def test_a_ring_refuses_windows_and_sinks_and_auto_takes_another_way(
    programs, override
):
    cut = (*GROUPED, override, "mesh.context=2", "mesh.data=1")
    with pytest.raises(ConfigError, match="context_attention=ulysses has"):
        programs(*cut, RING, devices=2)
    chosen = programs(*cut, devices=2).how.context_attention
    assert chosen is not ContextAttention.ring
