"""What an instruction is for."""

import pytest

from model.gpt import abstract_gpt
from train.plan.compiled.attribution import _WEIGHTS, scope, serves
from train.plan.compiled.trip_counts import read

# The state of a loop over layers: a counter, the weights, and what passes on.
# The slice bears the name of an einsum that up and gate share.
STEP = """HloModule step

%body (s: (s32[], f32[4,8,8], f32[8,8])) -> (s32[], f32[4,8,8], f32[8,8]) {{
  %s = (s32[], f32[4,8,8], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %w = f32[4,8,8] get-tuple-element(%s), index=1
  %x = f32[8,8] get-tuple-element(%s), index=2
  %z = s32[] constant(0)
  %cut = f32[1,8,8] dynamic-slice(%w, %i, %z, %z), dynamic_slice_sizes={{1,8,8}}, \
metadata={{op_name="jit(step)/jvp(layers)/while/body/btd,df->btf/convert"}}
  %g = f32[1,8,64] all-gather(%{gathered}), replica_groups={{}}, dimensions={{2}}
  %d = f32[8,8] dot(%x, %x), lhs_contracting_dims={{1}}, metadata={{op_name="{name}"}}
  %b = f32[8,8] bitcast(%d)
  %r = (f32[8,8], f32[]) all-reduce(%b, %z), replica_groups={{}}, to_apply=%add
  ROOT %t = (s32[], f32[4,8,8], f32[8,8]) tuple(%i, %w, %x)
}}

ENTRY %main (a: f32[4,8,8], c: f32[8,8]) -> (s32[], f32[4,8,8], f32[8,8]) {{
  %a = f32[4,8,8] parameter(0), metadata={{op_name="{argument}"}}
  %c = f32[8,8] parameter(1)
  %zero = s32[] constant(0)
  %h = f32[4,8,8] convert(%a)
  %start = (s32[], f32[4,8,8], f32[8,8]) tuple(%zero, %h, %c)
  ROOT %l = (s32[], f32[4,8,8], f32[8,8]) while(%start), condition=%body, body=%body,
}}
"""
UP = r"state.params[\'layers\'][\'mlp\'][\'up\'][\'weight\']"


def uses(opcode: str, name: str = "", argument: str = UP, gathered: str = "cut"):
    text = STEP.format(name=name, argument=argument, gathered=gathered)
    text = text.replace(
        "body=%body,",
        'body=%body, metadata={op_name="jit(step)/transpose(jvp(layers))/while"},'
        ' backend_config={"known_trip_count":{"n":"4"}}',
    )
    module = read(text)
    (found,) = [e for e in module.executed if e.instruction.opcode == opcode]
    assert scope(found, found.instruction) == "layers backward"
    return serves(module, found, found.instruction, found.computation)


def test_a_gathered_weight_is_followed_to_the_argument():
    assert uses("all-gather") == [("mlp.up", 4 * 64)]


def test_what_is_no_parameter_has_the_name_of_its_einsum_or_none():
    shared = [("mlp.up, gate", 4 * 64)]
    assert uses("all-gather", argument="batch.inputs") == shared
    assert uses("all-gather", gathered="x") == [("other", 4 * 64)]


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("jit(step)/jvp(layers)/while/body/btd,dnh->btnh/dot_general", "query"),
        ("jit(step)/jvp(layers)/while/body/btd,btkh->dkh/dot_general", "key, value"),
        ("jit(step)/transpose(jvp(layers))/while/body/btd,nhd->btnh/dot", "output"),
    ],
)
def test_an_einsum_tells_the_weight(name, use):
    assert uses("all-reduce", name) == [(f"attention.{use}", 4 * 64), ("scalars", 4)]


def test_the_letters_are_those_of_the_model(configure):
    """Every weight's einsum is known."""
    model = abstract_gpt(configure("model=gpt_nano", "model.vocab_size=384").model)
    layers = model.layers
    linears = [
        *(layers.attention.query, layers.attention.key, layers.attention.value),
        *(layers.attention.output, layers.mlp.up, layers.mlp.down, model.head),
    ]
    for linear in filter(None, linears):
        assert linear.spec.split("->")[0].split(",")[1] in _WEIGHTS
