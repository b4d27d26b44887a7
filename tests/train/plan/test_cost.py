"""A plan states and prints FLOPs, bytes and collectives."""

import dataclasses
import json

import jax

from benchmarks.published import cost_of
from train.plan.cost import print_cost
from train.plan.plan import compile_and_read


def test_data_parallelism_reduces_every_gradient_once(programs, capsys):
    """Gradients are reduced in float32, and nothing else of that size is reduced."""
    program = programs(["mesh.data=4"], devices=4)
    cost = compile_and_read(program).cost
    assert cost.unread == ()
    gradient_bytes = 4 * sum(x.size for x in jax.tree.leaves(program.state.params))
    reduced_bytes = sum(t.payload for t in cost.sent if t.kind == "all-reduce")
    assert gradient_bytes <= reduced_bytes < 1.01 * gradient_bytes + 1000
    assert {t.axes for t in cost.sent} == {("data",)}
    values = json.loads(json.dumps(cost.as_json()))
    assert cost_of(values) == cost
    assert 0.9 < values["executed_over_model_flops"] < 1.6
    print_cost(dataclasses.replace(cost, unread=("an unknown line",)))
    printed = capsys.readouterr().out
    assert "all-reduce" in printed
    assert "not read    1 lines" in printed
