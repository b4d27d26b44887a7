"""What the plan says that a step computes and sends."""

import dataclasses
import json

import jax

from benchmarks.published import cost_of
from train.plan.compiled.step import read_step
from train.plan.cost import print_cost


def test_the_plan_of_copies_reduces_every_gradient_once(programs, capsys):
    """Pure data parallelism: all gradients, in float32, and nothing else of size."""
    program = programs("mesh.data=4", devices=4)
    lowered = program.train_step.lower(program.state, program.batch)
    found = read_step(program, lowered.compile().as_text() or "", {})
    assert found.unread == ()
    gradients = 4 * sum(x.size for x in jax.tree.leaves(program.state.params))
    reduced = sum(t.payload for t in found.sent if t.kind == "all-reduce")
    assert gradients <= reduced < 1.01 * gradients + 1000
    assert {t.axes for t in found.sent} == {("data",)}
    as_json = json.loads(json.dumps(found.as_json()))
    assert cost_of(as_json) == found
    assert 0.9 < as_json["executed_over_model_flops"] < 1.6
    print_cost(dataclasses.replace(found, unread=("what is this",)))
    said = capsys.readouterr().out
    assert "computes" in said
    assert "all-reduce" in said
    assert "not read    1 lines" in said
