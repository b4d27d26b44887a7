"""Each instruction is attributed to the part of the model that it serves."""

import pytest

from train.plan.compiled.attribution import operand_uses, part_in_name, scope_of
from train.plan.compiled.trip_counts import read_module

LAYERS = "jit(step)/jvp(layers)/while/body"
# One trip of a loop over layers: a weight is gathered, and gradients are reduced.
STEP = """HloModule step

%made (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  ROOT %d = f32[8,8] dot(%p, %p), lhs_contracting_dims={{1}}, \
metadata={{op_name="{product}"}}
}}

%body (s: (s32[], f32[4,8,8], f32[8,8])) -> (s32[], f32[4,8,8], f32[8,8]) {{
  %s = (s32[], f32[4,8,8], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %w = f32[4,8,8] get-tuple-element(%s), index=1
  %x = f32[8,8] get-tuple-element(%s), index=2
  %z = s32[] constant(0)
  %cut = f32[1,8,8] dynamic-slice(%w, %i, %z, %z), dynamic_slice_sizes={{1,8,8}}
  %g = f32[1,8,64] all-gather(%cut), replica_groups={{}}, dimensions={{2}}, \
metadata={{op_name="{gather}"}}
  %u = f32[8,8] multiply(%g, %x), metadata={{op_name="{user}"}}
  %f = f32[8,8] fusion(%x), kind=kLoop, calls=%made
  %b = f32[8,8] bitcast(%f)
  %r = (f32[8,8], f32[]) all-reduce(%b, %z), replica_groups={{}}, to_apply=%made
  ROOT %t = (s32[], f32[4,8,8], f32[8,8]) tuple(%i, %w, %x)
}}

ENTRY %main (a: f32[4,8,8], c: f32[8,8]) -> (s32[], f32[4,8,8], f32[8,8]) {{
  %a = f32[4,8,8] parameter(0)
  %c = f32[8,8] parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,8,8], f32[8,8]) tuple(%zero, %a, %c)
  ROOT %l = (s32[], f32[4,8,8], f32[8,8]) while(%start), condition=%body, body=%body, \
metadata={{op_name="jit(step)/transpose(jvp(layers))/while"}}, \
backend_config={{"known_trip_count":{{"n":"4"}}}}
}}
"""


def uses(opcode: str, product: str = "", gather: str = "", user: str = ""):
    module = read_module(STEP.format(product=product, gather=gather, user=user))
    (execution,) = [e for e in module.executed if e.instruction.opcode == opcode]
    assert scope_of(execution, execution.instruction) == "layers backward"
    return operand_uses(execution, execution.instruction)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (f"{LAYERS}/part.mlp/part.up/btd,df->btf/dot_general", "mlp.up"),
        (f"{LAYERS}/checkpoint/rematted_computation/part.norm/mul", "norm"),
        ("jit(step)/transpose(jvp(part.embedding))/jit(_take)/scatter", "embedding"),
        ("jit(step)/jvp(loss)/part.head/shard_map/psum", "head"),
        (f"{LAYERS}/add", ""),
        ("", ""),
    ],
)
def test_a_name_contains_its_part_of_the_model(name, part):
    assert part_in_name(name) == part


def test_an_instruction_without_a_name_serves_the_part_of_its_neighbours():
    up = f"{LAYERS}/part.mlp/part.up/mul"
    down = f"{LAYERS}/part.mlp/part.down/dot"
    assert uses("all-gather") == [("other", 4 * 64)]
    assert uses("all-gather", user=up) == [("mlp.up", 4 * 64)]
    assert uses("all-gather", gather=down, user=up) == [("mlp.down", 4 * 64)]
    assert uses("all-reduce", product=down) == [("mlp.down", 4 * 64), ("scalars", 4)]
