"""A plan advises what its figures say."""

import dataclasses

import pytest

from tests.train.machines import in_one_section
from train.plan import plan as planning
from train.plan.__main__ import print_plan
from train.plan.budget import MemoryBudget
from train.plan.plan import estimate

GPT2 = (
    *("model=gpt2_124m", "model.vocab_size=50304", "optimizer=adamw"),
    "data.sequence_length=1024",
)
AMPLE = MemoryBudget(*[2**40] * 3)


@pytest.fixture
def laid_out(composed, lay_out):
    """Lay GPT-2 out on absent chips: (target, *overrides) -> Program."""
    return lambda target, *more: lay_out(composed(*GPT2, *more), target)


def test_a_step_that_computes_less_than_the_model_needs_is_a_bug(laid_out):
    """Its MFU would be higher than products can reach."""
    plan = estimate(laid_out("v5e-8", "mesh=fsdp", "data.batch_size=64"), AMPLE)
    too_few = 0.8 * plan.cost.model_flops
    flops = dataclasses.replace(plan.cost.flops, products=too_few, attention=0.0)
    wrong = dataclasses.replace(plan, cost=in_one_section(plan.cost, flops))
    with pytest.raises(planning.ImpossibleCost, match="bug of"):
        wrong.as_json()
    unread = dataclasses.replace(flops, unknown=("a kernel",))
    cost = in_one_section(plan.cost, unread)
    assert dataclasses.replace(plan, cost=cost).prediction, "more may be computed"


ALL_PRODUCTS = "[attention,query,key,value,attention_output,mlp_gate,mlp_up]"


@pytest.mark.parametrize(
    ("factor", "override"), [(0.5, f"train.remat={ALL_PRODUCTS}"), (2.0, "")]
)
def test_recomputing_less_is_advised_if_it_is_faster(
    laid_out, monkeypatch, factor, override
):
    """If products take the same time, the policy that moves least is advised."""
    program = laid_out("v5e-8", "mesh=fsdp", "data.batch_size=64", "train.remat=full")

    def bound(of, budget, factor=1.0):
        plan = estimate(of, budget)
        flops = dataclasses.replace(plan.cost.flops, products=factor * 1e15)
        return dataclasses.replace(plan, cost=in_one_section(plan.cost, flops))

    def estimated(of, budget):
        return bound(of, budget, 1.0 if of is program else factor)

    plan = bound(program, AMPLE)
    monkeypatch.setattr(planning, "estimate", estimated)
    assert plan.advice.override == override
    assert "matrix products take" in plan.advice.bottleneck
    assert ("no faster" in plan.advice.change) is (not override)


@pytest.mark.parametrize(
    ("mib", "change", "override"),
    [
        (2500, "estimated to fit", "mesh.data=2 mesh.fsdp=4 train.remat="),
        pytest.param(100, "split layers into more parts", "", marks=pytest.mark.slow),
    ],
)
def test_what_does_not_fit_is_advised_if_no_speed_is_known(
    laid_out, capsys, mib, change, override
):
    """No source states v4's network between slices, so no search compares layouts."""
    copies = "mesh=ddp", "mesh.dcn.data=2", "data.batch_size=64"
    plan = estimate(laid_out("v4-8x2", *copies), MemoryBudget(*[mib * 2**20] * 3))
    assert plan.prediction is None
    assert plan.advice is not None
    assert plan.advice.change.endswith(change)
    assert plan.advice.override.startswith(override)
    assert bool(plan.advice.override) is bool(override)
    print_plan(plan, verdict=True)
    printed = capsys.readouterr().out
    assert "no prediction: TPU v4" in printed
    assert plan.advice.change in printed
    for suggested in plan.advice.changes:
        assert suggested.override in printed
    assert estimate(laid_out("v4-8x2", *copies), AMPLE).advice is None


def test_what_does_not_fit_has_no_speed(laid_out, capsys):
    program = laid_out("v5e-8", "mesh=fsdp", "data.batch_size=64")
    needed = estimate(program, AMPLE).memory.needed.bytes
    plan = estimate(program, MemoryBudget(*[needed - 1] * 3))
    values = plan.as_json()
    assert values["fits"] is False
    assert values["prediction"] is None
    assert values["advice"]["changes"], "what each change needs"
    print_plan(plan, verdict=True)
    printed = capsys.readouterr().out
    assert "MFU" not in printed
    assert "bottleneck  memory: " in printed
