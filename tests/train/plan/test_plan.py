"""The advice of a plan follows from its figures."""

import dataclasses
import time

import pytest

from train.plan import compiling
from train.plan.__main__ import print_plan
from train.plan.budget import MemoryBudget
from train.plan.compiling import print_changes, print_estimate, shown_compilation
from train.plan.plan import compile_and_read, compile_small, estimate
from train.plan.recomputing import parse_policy
from train.units import format_bytes

GPT2 = (
    *("model=gpt2_124m", "model.vocab_size=50304", "optimizer=adamw"),
    "data.sequence_length=1024",
)
AMPLE = MemoryBudget(*[2**40] * 3)


@pytest.fixture
def laid_out(composed, lay_out):
    """Return a function: (target, overrides) -> GPT-2 laid out on absent chips."""
    return lambda target, overrides: lay_out(composed([*GPT2, *overrides]), target)


@pytest.mark.parametrize(
    ("mib", "change", "override"),
    [
        (2500, "estimated to fit", "mesh.data=2 mesh.fsdp=4 train.remat="),
        pytest.param(100, "split layers into more parts", "", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_does_not_fit_gets_advice_if_no_speed_is_known(
    laid_out, capsys, mib, change, override
):
    """No source states v4's network between slices, so no search compares layouts."""
    layout = "mesh=ddp", "mesh.dcn.data=2", "data.batch_size=64"
    plan = estimate(laid_out("v4-8x2", layout), MemoryBudget(*[mib * 2**20] * 3))
    assert plan.prediction is None
    assert plan.advice is not None
    assert plan.advice.change.endswith(change)
    assert plan.advice.override.startswith(override)
    assert bool(plan.advice.override) is bool(override)
    print_plan(plan, plan.verdict)
    printed = capsys.readouterr().out
    assert "no prediction: not all rates of TPU v4" in printed
    assert plan.advice.change in printed
    for suggestion in plan.advice.changes:
        assert suggestion.override in printed
    assert estimate(laid_out("v4-8x2", layout), AMPLE).advice is None


def test_an_estimate_of_experts_across_gpus_states_no_speed(laid_out, capsys):
    """A search still compares such layouts."""
    words = ["model=mixtral_8x7b", "model.num_layers=2", "data.batch_size=16"]
    for sizes, has_speed in ((["mesh.expert=8"], False), (["mesh.fsdp=8"], True)):
        plan = estimate(laid_out("h100-8", [*words, "mesh=fsdp", *sizes]), AMPLE)
        assert plan.relative_prediction is not None
        assert bool(plan.prediction) is has_speed
        print_plan(plan, plan.verdict)
        printed = capsys.readouterr().out
        assert ("Compile this step" in printed) is not has_speed
        assert ("MFU" in printed) is has_speed
        assert bool(plan.as_json()["prediction"]) is has_speed


def test_a_step_that_does_not_fit_has_no_speed(laid_out, capsys):
    program = laid_out("v5e-8", ["mesh=fsdp", "data.batch_size=64"])
    needed = estimate(program, AMPLE).memory.needed.bytes
    plan = estimate(program, MemoryBudget(*[needed - 1] * 3))
    values = plan.as_json()
    assert values["fits"] is False
    assert values["prediction"] is None
    assert values["advice"]["changes"], "what each change needs"
    print_plan(plan, plan.verdict)
    printed = capsys.readouterr().out
    assert "MFU" not in printed
    assert "bottleneck  memory: " in printed


def test_an_estimate_is_shown_before_and_beside_what_is_compiled(laid_out, capsys):
    guess = estimate(laid_out("v5e-8", ["mesh=fsdp", "data.batch_size=64"]))
    needed = format_bytes(guess.memory.needed.bytes)
    print_estimate(guess)
    printed = capsys.readouterr().out
    assert f"estimated   at least {needed} a device" in printed
    assert "s a step, MFU" in printed
    larger = dataclasses.replace(guess.memory.needed, bytes=2**40)
    memory = dataclasses.replace(guess.memory, needed=larger)
    print_changes(guess, dataclasses.replace(guess, memory=memory))
    (row,) = [x for x in capsys.readouterr().out.splitlines() if "memory of a" in x]
    assert needed in row
    assert "1.00 TiB" in row


def test_a_long_compilation_says_how_long_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "_INTERVAL_S", 0.05)
    with shown_compilation("v5e-8"):
        time.sleep(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "compiling   the step for v5e-8"
    assert lines[1].startswith("compiling   for ")


def test_a_small_copy_predicts_the_memory_of_a_deep_model(programs):
    shape = "model.num_layers=8", "train.remat=full", "model.embed_dim=64"
    program = programs(["mesh=fsdp", *shape], devices=4)
    full = compile_and_read(program)
    copy = compile_small(program)
    assert (copy.memory.needed.how, copy.cost.how) == ("extrapolated", "estimated")
    needed = full.memory.needed.bytes
    assert copy.memory.needed.bytes == pytest.approx(needed, rel=0.05)


@pytest.mark.slow
def test_recomputing_less_is_advised_if_it_fits_and_is_faster(composed, lay_out):
    shape = "model=llama3_8b", "model.num_layers=4", "data.sequence_length=4096"
    options = "optimizer=adamw", "mesh=fsdp", "data.batch_size=64", "train.remat=full"
    program = lay_out(composed([*shape, *options]), "v5p-64")
    plan = estimate(program, AMPLE)
    assert plan.advice.bottleneck.startswith("bound by computing")
    remat = parse_policy(plan.advice.override.removeprefix("train.remat="))
    train = dataclasses.replace(program.config.train, remat=remat)
    faster_plan = estimate(program.with_train_config(train), AMPLE)
    assert faster_plan.prediction.middle.step_s < plan.prediction.middle.step_s
    tight_budget = MemoryBudget(*[plan.memory.needed.bytes] * 3)
    assert estimate(program, tight_budget).advice.override == "search=true"
