"""Devices that share rows attend correctly; test_meshes.py has other meshes."""

import numpy as np
import pytest

from data.batch import Batch
from data.errors import Mistake
from model.choices import Attention, ContextAttention
from model.parts.context.context_parallel import choose_context_attention
from tests.train.conftest import distance

GROUPED = ("model.num_heads=8", "model.num_kv_heads=4")
RING = "mesh.context_attention=ring"
ALL_GATHER = "mesh.context_attention=all_gather"


@pytest.mark.parametrize(
    "way", [pytest.param(RING, marks=pytest.mark.slow), ALL_GATHER]
)
def test_replicated_key_heads_meet_their_own_queries(gradients, way):
    """A device has four of the eight query heads, and all four key heads."""
    replicated_heads = ("mesh.params.kv_heads=null", "mesh.activations.kv_heads=null")
    mesh = ("mesh.context=2", "mesh.tensor=2", "mesh.fsdp=2", way, *replicated_heads)
    loss, grads, _ = gradients([*GROUPED, "mesh=single"], devices=1)
    actual = gradients([*GROUPED, *mesh])
    assert actual[0] == pytest.approx(loss, rel=1e-5)
    assert distance(actual[1], grads) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7])
def test_no_loss_depends_on_later_tokens(gradients, programs, window):
    """The loss of one target a row has gradients only for the tokens that it may see.

    All tokens of the batch differ, so each has its own row of the embedding gradient.
    """
    overrides = (*GROUPED, "model.vocab_size=512", "model.tied_head=false")
    overrides = (
        *overrides,
        "model.token_shift=none",
    )  # it reaches one position further
    overrides = (*overrides, f"model.window={window or 'null'}", "model.num_layers=4")
    overrides = (*overrides, "mesh.context=4", "mesh.pipeline=2", "data.batch_size=8")
    B = 8
    T = 32
    tokens = np.arange(B * T, dtype=np.int32).reshape(B, T)
    columns = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    documents = np.where(columns < 13, 1, 2)
    for first in range(0, T, B):  # each column is the target of some row
        target_columns = first + np.arange(B)[:, None]
        batch = Batch(
            inputs=tokens,
            targets=np.where(columns == target_columns, tokens, -1),
            segment_ids=documents.astype(np.int32),
            positions=np.where(columns < 13, columns, columns - 13),
        )
        _, grads, _ = gradients(overrides, batch=batch)
        rows = np.abs(grads["embedding"]["weight"][: B * T]).sum(1).reshape(B, T)
        target_documents = np.take_along_axis(documents, target_columns, axis=1)
        visible = (documents == target_documents) & (columns <= target_columns)
        if window is not None:  # four layers reach four times as far
            visible &= target_columns - columns <= 4 * (window - 1)
        np.testing.assert_array_equal(rows > 0, visible)


@pytest.mark.parametrize(
    ("asked", "kernel", "length", "kv_heads", "answer"),
    [
        ("auto", "splash", 4096, 3, "ring"),  # every layer would save the gathered keys
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
def test_a_context_attention_that_can_serve_is_chosen(
    asked, kernel, length, kv_heads, answer
):
    requested = ContextAttention(asked)
    attention = Attention(kernel)
    chosen = choose_context_attention(requested, attention, 4, length, kv_heads)
    if answer in list(ContextAttention):
        assert chosen == answer
        return
    assert isinstance(chosen, Mistake)
    assert (chosen.key, chosen.value) == ("mesh.context_attention", requested)
    assert answer in chosen.rule


@pytest.mark.parametrize(
    ("kernel", "kv_bytes", "answer"),
    [
        ("splash", 2**30, "all_gather"),
        ("splash", 2**30 + 1, "ring"),  # too large together with the gradients
        ("cudnn", 1, "ring"),
    ],
)
def test_splash_gathers_keys_that_take_little_memory(kernel, kv_bytes, answer):
    auto = ContextAttention.auto
    assert (
        choose_context_attention(auto, Attention(kernel), 4, 4096, 3, kv_bytes)
        == answer
    )
