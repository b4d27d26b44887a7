"""Remat policies are listed in the order of what they save, the least first."""

import pytest

from model.mixer_catalog import MIXERS
from train.cli.command import compose
from train.config import Remat
from train.plan.plan import estimate
from train.plan.recomputing import (
    POLICIES,
    format_policy,
    parse_policy,
    policies_keeping_less,
    policies_keeping_more,
)


@pytest.mark.parametrize("policy", [*POLICIES, ()])
def test_a_formatted_policy_is_parsed_by_plans_and_configs(policy):
    assert parse_policy(format_policy(policy)) == policy
    assert compose([f"train.remat={format_policy(policy)}"]).train.remat == policy


LATENT = ("attention", "latent")


@pytest.mark.parametrize("mixer", MIXERS)
def test_policies_are_listed_beginning_with_the_next_one(mixer):
    def config(remat, *offload: str):
        names = ",".join(offload)
        remat = f"train.remat={format_policy(remat)}"
        return compose([remat, f"train.offload=[{names}]", f"model.mixer={mixer}"])

    def more(config):
        return policies_keeping_more(config.model, config.train)

    def less(config):
        return policies_keeping_less(config.model, config.train)

    none, dots, full = map(config, Remat)
    attention = config(("attention",))
    policies = [p for p in POLICIES if p != LATENT or mixer == "latent_attention"]
    assert more(full) == policies[1:]
    assert less(none) == [*reversed(policies[:-1])]
    assert more(none) == less(full) == []
    # Saving attention saves neither more nor less than saving products.
    assert less(dots) == policies_keeping_less(attention.model, attention.train)
    assert {*more(attention)} == {*policies[2:]} - {Remat.dots}
    offload_config = config(Remat.full, "attention")
    assert more(offload_config) == [Remat.dots]


@pytest.mark.slow
def test_a_policy_that_saves_more_needs_more_memory_and_fewer_flops(programs):
    swiglu = "model.activation=swiglu"
    remats = (
        f"train.remat={format_policy(policy)}"
        for policy in POLICIES
        if policy != LATENT
    )
    plans = [estimate(programs([remat, swiglu])) for remat in remats]
    memory = [plan.memory.needed.bytes for plan in plans]
    flops = [plan.cost.flops.total for plan in plans]
    assert memory == sorted(memory)
    assert flops == sorted(flops, reverse=True)
