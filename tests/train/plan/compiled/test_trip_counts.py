"""The trips of loops and the executions of branches are counted."""

import pytest

from model.config import ModelConfig
from train.plan.compiled.trip_counts import read_module

BODY = """HloModule loop

%step (s: (s32[], s32[])) -> (s32[], s32[]) {{
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = s32[] get-tuple-element(%s), index=1
  %by = s32[] constant({by})
  %next = s32[] add(%by, %i)
  ROOT %t = (s32[], s32[]) tuple(%next, %x)
}}

%goes_on (s: (s32[], s32[])) -> pred[] {{
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %end = s32[] constant({end})
  ROOT %lt = pred[] compare(%i, %end), direction=LT
}}

ENTRY %main (x: s32[]) -> (s32[], s32[]) {{
  %x = s32[] parameter(0)
  %begin = s32[] {begin}
  %copied = s32[] copy(%begin)
  %start = (s32[], s32[]) tuple(%copied, %x)
  ROOT %loop = (s32[], s32[]) while(%start), condition=%goes_on, body=%step
}}
"""


def count_trips(begin: str, end: int, increment: int) -> tuple[int, list[str]]:
    module = read_module(BODY.format(begin=begin, end=end, by=increment))
    trips = module.loops["step"].trips
    assert trips == max(e.count for e in module.executed if e.loops)
    return trips, module.unread


@pytest.mark.parametrize(
    ("begin", "end", "by", "expected"), [(0, 12, 1, 12), (3, 12, 4, 3), (1, 2, 1, 1)]
)
def test_a_loops_counter_is_run_to_count_its_trips(begin, end, by, expected):
    assert count_trips(f"constant({begin})", end, by) == (expected, [])


def test_a_loop_that_depends_on_data_counts_once_and_is_listed():
    unread = ["trip count of loop: counted as 1"]
    assert count_trips("negate(%x)", 12, 1) == (1, unread)


def test_a_loop_without_a_name_gets_the_most_frequent_one_of_its_body():
    """XLA moves invariants of other loops into the body."""
    text = BODY.format(begin="constant(0)", end=12, by=1)
    inner = {"constant(1)": "loss", "add(%by, %i)": "layers", "(%next, %x)": "layers"}
    for instruction, scope in inner.items():
        metadata = f'metadata={{op_name="jit(step)/{scope}/while/body/x"}}'
        text = text.replace(instruction, f"{instruction}, {metadata}")
    assert read_module(text).loops["step"].op_name == "jit(step)/layers/while"


BRANCHES = """HloModule branches

%no (p: f32[4]) -> f32[8] {{
  %p = f32[4] parameter(0)
  ROOT %g = f32[8] all-gather(%p), dimensions={{0}}, metadata={{op_name="{inside}/no"}}
}}

%yes (q: f32[4]) -> f32[8] {{
  %q = f32[4] parameter(0)
  ROOT %n = f32[8] broadcast(%q), metadata={{op_name="{inside}/yes"}}
}}

%step (s: f32[4]) -> f32[4] {{
  %s = f32[4] parameter(0)
  %c = f32[8] conditional(%i, %s, %s), branch_computations={{%no, %yes}}, \
metadata={{op_name="{name}"}}
  ROOT %r = f32[4] slice(%c), slice={{[0:4]}}
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4] parameter(0)
  ROOT %loop = f32[4] while(%x), body=%step, {trips}
}}
"""
TRIPS = 'backend_config={"known_trip_count":{"n":"8"}}'
# One of four layers is global, and one has high precision.
MODEL = ModelConfig(
    num_layers=4,
    window=3,
    layer_pattern=("local", "local", "local", "global"),
    high_precision_layers=("first",),
)


@pytest.mark.parametrize(
    ("name", "inside", "no", "yes"),
    [
        ("jvp(layers)/part.attention/cond", "jvp(layers)", 2, 6),
        ("jvp(layers)/cond", "jvp(layers)/part.attention/part.norm", 2, 6),
        ("jvp(layers)/part.mlp/cond", "jvp(layers)/part.mlp", 0, 8),
        ("jit(step)/conditional.1", "transpose(jvp(layers))", 6, 2),
        ("optimizer/cond", "optimizer", 8, 8),
    ],
)
def test_branches_are_taken_as_often_as_the_model_says(name, inside, no, yes):
    text = BRANCHES.format(name=name, inside=inside, trips=TRIPS)
    module = read_module(text, MODEL)
    counts = {e.instruction.name: e.count for e in module.executed}
    assert (counts.get("g", 0), counts["n"]) == (no, yes)
    # This also holds if no gather is executed.
    assert module.unread == []
    counts_without_model = {
        e.instruction.name: e.count for e in read_module(text).executed
    }
    assert counts_without_model["g"] == counts_without_model["n"] == 8


def test_the_branches_of_a_truth_value_are_read_by_name():
    """XLA:GPU writes the true branch first."""
    name = "jvp(layers)/part.attention/cond"
    text = BRANCHES.format(name=name, inside="jvp(layers)", trips=TRIPS)
    text = text.replace(
        "branch_computations={%no, %yes}",
        "true_computation=%yes, false_computation=%no",
    )
    module = read_module(text, MODEL)
    counts = {e.instruction.name: e.count for e in module.executed}
    assert (counts["g"], counts["n"], module.unread) == (2, 6, [])


def test_branches_that_cannot_be_read_are_listed():
    text = BRANCHES.format(name="cond", inside="layers", trips=TRIPS)
    text = text.replace("branch_computations=", "unknown_computations=")
    unread = read_module(text, MODEL).unread
    assert unread == ["c: runs nothing known", "g: in no executed instruction"]


def test_a_loop_of_few_trips_takes_a_branch_a_fraction_of_a_time():
    name = "jvp(layers)/part.attention/cond"
    trips = TRIPS.replace('"8"', '"2"')
    text = BRANCHES.format(name=name, inside="jvp(layers)", trips=trips)
    counts = {e.instruction.name: e.count for e in read_module(text, MODEL).executed}
    assert (counts["g"], counts["n"]) == (0.5, 1.5)
