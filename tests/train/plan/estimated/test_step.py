"""The whole estimate, without a compiler."""

import json
from collections import defaultdict
from pathlib import Path

import jax
import pytest

from train.hardware.targets import parse_target
from train.plan.budget import memory_budget
from train.plan.estimated.step import (
    estimate_items,
    estimate_memory,
    estimate_step,
)
from train.plan.memory import HELD, device_memory, print_memory
from train.plan.plan import estimate


@pytest.fixture
def laid_out(composed, lay_out):
    """Lay a model out on stand-ins: (target, *overrides) -> Program."""
    base = ("optimizer=adamw", "tracker=none", "model.vocab_size=65536")
    return lambda target, *more: lay_out(composed(*base, *more), target)


FIGURES = json.loads(Path(__file__).with_name("compiled_figures.json").read_text())
GPT2 = ("model=gpt2_124m", "data.sequence_length=1024", "data.batch_size=64")


@pytest.mark.parametrize("figures", FIGURES, ids=lambda row: row["case"])
def test_estimates_are_near_compiled_steps(laid_out, figures):
    """FLOPs are exact, but for what XLA computes twice. Memory is within a third.

    Main-memory traffic is within a factor of 1.85, and 2.6 where the loss is in pieces:
    no constant stands for what XLA fuses or keeps in a core's memory.
    """
    target, *overrides = figures["case"].split()
    vocabulary = f"model.vocab_size={figures['vocab_size']}"
    program = laid_out(target, vocabulary, *overrides)
    cost, items = estimate_step(program), estimate_items(program)
    found = cost.flops.total + figures.get("repeated_flops", 0)
    assert found == pytest.approx(figures["flops"], rel=1e-3)
    size = sum(figure.bytes for figure in items.values())
    assert 0.8 < size / figures["temporaries"] < 1.4
    if "hbm_bytes" in figures:
        highest = 2.6 if "exponentials" in items else 1.85
        assert 0.7 < cost.hbm_bytes.total / figures["hbm_bytes"] < highest


def test_the_state_is_exact_and_temporaries_are_itemised(laid_out):
    program = laid_out("h100-8", *GPT2, "mesh=fsdp")
    known, ledger = device_memory(program), estimate_memory(program)
    assert ledger.needed is not None
    assert ledger.needed.how == "estimated"
    assert {ledger.parts[name] for name in HELD} == {known.parts[n] for n in HELD}
    items = estimate_items(program)
    assert ledger.temporaries == items
    held = sum(known.parts[name].bytes for name in HELD)
    size = sum(figure.bytes for figure in items.values())
    assert ledger.needed.bytes == held + size
    assert ledger.parts["temporaries"].bytes == size
    assert items["saved activations"].bytes > size / 3


def test_there_is_a_verdict_without_a_compiler(laid_out, capsys):
    room = memory_budget(parse_target("v5e-8").chip, margin=0.05)
    fits = estimate_memory(laid_out("v5e-8", *GPT2, "mesh=ddp"))
    large = estimate_memory(laid_out("v5e-8", *GPT2, "mesh=ddp", "data.batch_size=256"))
    assert (fits.fits(room), large.fits(room)) == (True, False)
    print_memory(large, room, None)
    assert "fits        no, " in capsys.readouterr().out


def test_slices_reduce_over_the_slow_network(laid_out):
    shape = ("mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2")
    found = estimate_step(laid_out("v5e-8x2", *GPT2, *shape))
    networks = {row.axes: row.network for row in found.sent}
    assert networks[("data",)] == "DCN"
    assert networks[("fsdp",)] == "ICI"
    (between,) = (r for r in found.sent if r.axes == ("data",))
    assert between.kind == "all-reduce"
    assert between.sent == between.payload  # 2 (n - 1) / n of it
    assert 0 < between.overlapped < 1
    near = {row.kind: row.overlapped for row in found.sent if row.axes == ("fsdp",)}
    assert near["reduce-scatter"] == 0 < near["all-gather"], "as compiled for TPUs"


def test_what_is_cut_across_slices_is_sent_in_their_network_and_then_between(laid_out):
    """Compiled (jax 0.10.2, libtpu 0.0.42.1), MiB that a chip sends."""
    shape = ("model=llama3_8b", "model.num_layers=2", "model.vocab_size=128256")
    rows = ("data.sequence_length=2048", "data.batch_size=64", "train.remat=full")
    mesh = ("mesh=fsdp", "mesh.dcn.fsdp=2")
    found = estimate_step(laid_out("v5e-16x2", *shape, *rows, *mesh)).sent
    sent = defaultdict[tuple[str, str], float](float)
    for row in found:
        sent[row.network, row.kind] += row.sent / 2**20
    # Of small vectors, which XLA sends as it likes.
    del sent["DCN", "all-reduce"], sent["ICI", "all-reduce"]
    # XLA pads the small scatters of the head's pieces.
    assert sent.pop(("ICI", "reduce-scatter")) == pytest.approx(1732.35, rel=8e-3)
    assert sent == pytest.approx(
        {
            ("DCN", "all-gather"): 83.33,
            ("DCN", "reduce-scatter"): 57.34,
            ("DCN", "all-to-all"): 32.0,
            ("ICI", "all-gather"): 2500.0,
        },
        rel=1e-3,
    )


def test_saving_products_is_faster_than_computing_them_again(laid_out):
    def speed(remat):
        shape = (*GPT2, "mesh=fsdp", f"train.remat={remat}", "model.vocab_size=50257")
        prediction = estimate(laid_out("v5e-8", *shape)).prediction
        assert prediction is not None
        return prediction.middle.tokens_per_second

    assert speed("dots") > 1.02 * speed("full")


def test_sums_and_items_agree(laid_out):
    found = estimate_step(laid_out("h100-8", *GPT2, "mesh=fsdp"))
    assert found.how == "estimated"
    outside = sum(row.payload for row in found.outside_layers)
    assert 0 < outside < sum(row.payload for row in found.sent)
    assert {row.network for row in found.sent} == {"NVLink"}
    assert json.loads(json.dumps(found.as_json()))["how"] == "estimated"


def test_nothing_is_lowered(laid_out, monkeypatch):
    program = laid_out("v5e-256", *GPT2, "mesh=fsdp", "data.batch_size=256")

    def refuse(*args, **options):
        raise AssertionError

    monkeypatch.setattr(jax.stages.Traced, "lower", refuse)
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    estimate_step(program)
    estimate_memory(program)


def test_a_gpu_joins_what_a_layer_gathers_but_no_sums_of_activations(laid_out):
    """12 layers forward and backward; compiled: 25 gathers and 13 scatters."""
    alone = ("mesh=fsdp", "model.vocab_size=50257")
    sent = estimate_step(laid_out("h100-8", *GPT2, *alone)).sent
    starts = {total.kind: total.count for total in sent}
    assert 24 <= starts["all-gather"] <= 30
    assert 12 <= starts["reduce-scatter"] <= 15
    across = ("mesh=fsdp_tensor", "mesh.tensor=4", "mesh.fsdp=2")
    sent = estimate_step(laid_out("h100-8", *GPT2, *across)).sent
    sums = [t for t in sent if t.axes == ("tensor",) and t.kind == "all-reduce"]
    assert sum(total.count for total in sums) >= 4 * 12
