"""Rows that devices share; other meshes are in test_meshes.py."""

import numpy as np
import pytest

from data.batch import Batch
from model.choices import Attention, ContextAttention
from model.parts.context.context_parallel import choose_context_attention
from tests.train.conftest import distance

GROUPED = ("model.num_heads=8", "model.num_kv_heads=4")
RING = "mesh.context_attention=ring"
ALL_GATHER = "mesh.context_attention=all_gather"


@pytest.mark.parametrize(
    "way", [pytest.param(RING, marks=pytest.mark.slow), ALL_GATHER]
)
def test_keys_of_all_heads_on_each_device_meet_their_own_queries(gradients, way):
    """Of eight query heads a device has four, and all four of the keys' heads."""
    everywhere = ("mesh.params.kv_heads=null", "mesh.activations.kv_heads=null")
    mesh = ("mesh.context=2", "mesh.tensor=2", "mesh.fsdp=2", way, *everywhere)
    loss, grads, _ = gradients(*GROUPED, "mesh=single", devices=1)
    found = gradients(*GROUPED, *mesh)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert distance(found[1], grads) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7])
def test_no_loss_depends_on_what_comes_after_it(gradients, programs, window):
    """By gradients: of one target a row, with respect to the embedding of each token.

    Every token of the batch is another one, so that each has a row of its own there.
    """
    named = (*GROUPED, "model.vocab_size=512", "model.tied_head=false")
    named = (*named, f"model.window={window or 'null'}", "model.num_layers=4")
    named = (*named, "mesh.context=4", "mesh.pipeline=2", "data.batch_size=8")
    B = 8
    T = 32
    tokens = np.arange(B * T, dtype=np.int32).reshape(B, T)
    places = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    documents = np.where(np.arange(T) < 13, 1, 2) * np.ones((B, 1))
    for first in range(0, T, B):  # each position is the target of some row
        own = first + np.arange(B)[:, None]
        batch = Batch(
            inputs=tokens,
            targets=np.where(places == own, tokens, -1),
            segment_ids=documents.astype(np.int32),
            positions=places,
        )
        _, grads, _ = gradients(*named, batch=batch)
        rows = np.abs(grads["embedding"]["weight"][: B * T]).sum(1).reshape(B, T)
        same = documents == np.take_along_axis(documents, own, axis=1)
        before = same & (places <= own)
        if window is not None:  # four layers reach four times as far
            before &= own - places <= 4 * (window - 1)
        np.testing.assert_array_equal(rows > 0, before)


@pytest.mark.parametrize(
    ("asked", "kernel", "length", "kv_heads", "answer"),
    [
        ("auto", "splash", 4096, 3, "ring"),  # every layer would save what is gathered
        ("auto", "xla", 4100, 3, "all_gather"),
        ("auto", "cudnn", 4100, 8, "ulysses"),
        ("auto", "cudnn_packed", 4096, 8, "ulysses"),
        ("ring", "cudnn_packed", 4096, 8, "ring needs model.attention=cudnn:"),
        ("auto", "splash", 4100, 3, "3 key and value heads"),
        ("ring", "splash", 4096 - 128, 8, "divisible by 1024, not 3968"),
        ("ulysses", "xla", 4096, 6, "6 key and value heads"),
        ("all_gather", "splash", 4096, 8, "all_gather"),
        ("all_gather", "splash", 4096 - 128, 8, "divisible by 1024, not 3968"),
        ("all_gather", "cudnn", 4096, 8, "needs model.attention=xla or splash"),
    ],
)
def test_what_can_serve_is_taken(asked, kernel, length, kv_heads, answer):
    given = Attention(kernel), 4, length, kv_heads
    if answer in list(ContextAttention):
        assert choose_context_attention(ContextAttention(asked), *given) == answer
        return
    with pytest.raises(ValueError, match=answer):
        choose_context_attention(ContextAttention(asked), *given)


@pytest.mark.parametrize(
    ("kernel", "kv_bytes", "answer"),
    [
        ("splash", 2**30, "all_gather"),
        ("splash", 2**30 + 1, "ring"),  # too large with its gradients
        ("cudnn", 1, "ring"),
    ],
)
def test_splash_gathers_what_takes_little_memory(kernel, kv_bytes, answer):
    auto = ContextAttention.auto
    assert (
        choose_context_attention(auto, Attention(kernel), 4, 4096, 3, kv_bytes)
        == answer
    )
