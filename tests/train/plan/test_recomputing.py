"""The ways to recompute, from what keeps least to what keeps most."""

import itertools

import pytest

from train.cli.command import compose
from train.config import Remat
from train.plan.estimated.local_step import local_step
from train.plan.estimated.step import estimate_memory, estimate_step, saved_bytes
from train.plan.recomputing import (
    POLICIES,
    format_policy,
    parse_policy,
    policies_keeping_less,
    policies_keeping_more,
)


@pytest.mark.parametrize("way", [*POLICIES, ()])
def test_what_is_typed_is_the_policy(way):
    assert parse_policy(format_policy(way)) == way
    assert compose([f"train.remat={format_policy(way)}"]).train.remat == way


def test_less_and_more_go_from_what_is_next():
    attention = ("attention",)
    assert policies_keeping_more(Remat.full) == [*POLICIES[1:]]
    assert policies_keeping_less(Remat.none) == [*reversed(POLICIES[:-1])]
    assert policies_keeping_less(attention) == [Remat.full]
    assert policies_keeping_more(Remat.none) == policies_keeping_less(Remat.full) == []
    # What keeps attention keeps neither more nor less than the products alone.
    assert policies_keeping_less(Remat.dots) == [Remat.full]
    assert {*policies_keeping_more(attention)} == {*POLICIES[2:]} - {Remat.dots}
    assert policies_keeping_more(("mlp_up",)) == [Remat.dots, *POLICIES[-2:]]


@pytest.mark.slow
def test_what_keeps_more_computes_less(programs):
    """By the estimate, of a model whose attention is XLA's: no kernel runs twice."""
    kept, flops = [], []
    for way in POLICIES:
        program = programs(
            f"train.remat={format_policy(way)}", "model.activation=swiglu"
        )
        kept.append(saved_bytes(local_step(program)))
        flops.append(estimate_step(program).flops.total)
        assert estimate_memory(program).needed.bytes > 0
    assert all(a < b for a, b in itertools.pairwise(kept))
    assert all(a >= b for a, b in itertools.pairwise(flops))
