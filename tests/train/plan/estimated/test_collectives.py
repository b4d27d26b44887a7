"""The textbook's figures by hand, and the compiled ledger's."""

import pytest

from tests.train.compiled import DOWN, MATRICES, B, D, L, T, V
from tests.train.plan.compiled.test_collectives import large, of, payload
from tests.train.plan.estimated.test_local_step import SHAPE as SMALL
from tests.train.plan.estimated.test_local_step import share
from train.plan.compiled.flops import count_flops
from train.plan.estimated.collectives import Exchange, exchanges
from train.plan.estimated.local_step import share_of
from train.plan.estimated.step import estimate_step

__all__ = ["share"]
BF16, F32 = 2, 4
LAYERS, WIDTH, HIDDEN, WORDS = 4, 64, 256, 512  # of the small share
SQUARES = WIDTH * 64 * 2 + WIDTH * 32 * 2 + 3 * WIDTH * HIDDEN  # of a layer
VECTORS = (2 * LAYERS + 1) * WIDTH


def total(found: list[Exchange], kind: str, axes: tuple[str, ...], **fields) -> float:
    return sum(
        e.payload
        for e in found
        if (e.kind, e.axes) == (kind, axes)
        and all(getattr(e, name) == value for name, value in fields.items())
    )


def test_copies_reduce_each_gradient_and_a_tied_table_twice(share):
    found = exchanges(share("mesh=ddp"), "tpu", muon=False)
    assert {(e.kind, e.axes) for e in found} == {("all-reduce", ("data",))}
    gradients = LAYERS * SQUARES + VECTORS + 2 * WORDS * WIDTH
    assert sum(e.payload for e in found if e.serves != "scalars") == F32 * gradients


def test_microbatches_gather_and_reduce_each_time(share):
    once, four = (
        exchanges(share("mesh=fsdp", f"train.accumulation_steps={n}"), "tpu", False)
        for n in (1, 4)
    )
    for kind in ("all-gather", "reduce-scatter"):
        assert total(once, kind, ("fsdp",)) > 0
        layers = {"in_layers": True}
        assert total(four, kind, ("fsdp",), **layers) == 4 * total(
            once, kind, ("fsdp",), **layers
        )


def test_the_head_is_gathered_once_and_scattered_once(share):
    found = exchanges(share("mesh=fsdp"), "tpu", muon=False)
    head = {"serves": "head"}
    assert total(found, "all-gather", ("fsdp",), **head) == BF16 * WORDS * WIDTH
    assert total(found, "reduce-scatter", ("fsdp",), **head) == F32 * WORDS * WIDTH
    assert not any(e.serves == "embedding" and "reduce" in e.kind for e in found)


@pytest.mark.parametrize(("remat", "times"), [("none", 4), ("dots", 4), ("full", 5)])
def test_tensor_reduces_activations(share, remat, times):
    cut = share("mesh=fsdp_tensor", "mesh.tensor=4", f"train.remat={remat}")
    found = exchanges(cut, "tpu", muon=False)
    activations = BF16 * cut.rows * cut.length * WIDTH
    reduced = total(found, "all-reduce", ("tensor",), in_layers=True)
    assert reduced == times * LAYERS * activations


def test_a_gpu_gathers_again_what_it_computes_again(share):
    cut = share("mesh=fsdp", "train.remat=full")
    down = BF16 * LAYERS * WIDTH * HIDDEN
    two, three = (
        sum(e.payload for e in exchanges(cut, platform, False) if e.in_layers)
        for platform in ("tpu", "gpu")
    )
    again = BF16 * LAYERS * SQUARES - down + F32 * LAYERS * 2 * WIDTH
    assert three - two == again


def test_shards_cross_between_copies(share):
    found = exchanges(share("mesh=fsdp", "mesh.data=2"), "tpu", muon=False)
    matrices = total(found, "all-reduce", ("data",), serves="mlp.up")
    assert matrices == F32 * LAYERS * WIDTH * HIDDEN / 4


def test_muon_exchanges_shards_for_whole_matrices_and_back(share):
    found = exchanges(share("mesh=fsdp_tensor", "mesh.tensor=2"), "tpu", muon=True)
    exchanged = total(found, "all-to-all", ("fsdp",), serves="muon")
    assert exchanged == 2 * F32 * LAYERS * SQUARES / 8
    assert total(found, "all-gather", ("tensor",), serves="muon") > 0


def test_muon_gathers_for_each_product_what_the_layers_do_not_divide(share):
    found = exchanges(share("mesh=fsdp", "mesh.data=4"), "tpu", muon=True)
    layer = SQUARES  # a device has one of the four, a half of it
    gathered = total(found, "all-gather", ("fsdp",), serves="muon")
    assert gathered == (5 * 2 * BF16 + F32) * layer
    results = total(found, "all-gather", ("data",), serves="muon")
    assert results == F32 * LAYERS * SQUARES / 2


def estimated(step) -> list[Exchange]:
    found = exchanges(share_of(step.program), "tpu", muon=False)
    return [e for e in found if e.in_layers and e.payload > 8 * F32 * (2 * L + 1) * D]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor_only"])
def test_the_loop_over_the_layers_sends_what_was_estimated(stored_step, name):
    """Of matrices and activations, exactly; XLA sends small vectors as it likes."""
    step = stored_step(name)
    guess = estimated(step)
    assert guess
    for kind in {e.kind for e in guess}:
        fact = [
            c
            for way in ("forward", "backward")
            for c in of(step.collectives, f"layers {way}", kind)
            if c.times == L
        ]
        assert payload(fact, leave="norm") == sum(
            e.payload for e in guess if e.kind == kind
        )
    assert {c.kind for c in large(step.collectives) if c.times == L} == {
        e.kind for e in guess
    }


def test_flops_are_those_of_the_compiled_step(stored_step):
    step = stored_step("ddp_full")
    fact, guess = count_flops(step.module), estimate_step(step.program).flops
    assert guess.products == fact.products
    assert guess.attention == fact.attention
    assert guess.whole_attention == fact.whole_attention


def test_sizes_are_those_of_the_models_above():
    assert MATRICES == 4 * D * D + 3 * DOWN
    assert (B, T, V) == (16, 256, 512)
    assert f"model.mlp_dim={HIDDEN}" in SMALL
