"""How often a loop runs."""

import jax
import jax.numpy as jnp
import pytest

from train.plan.compiled.trip_counts import read_module

BODY = """HloModule loop

%step (s: (s32[], s32[])) -> (s32[], s32[]) {{
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %by = s32[] get-tuple-element(%s), index=1
  %next = s32[] add(%i, %by)
  ROOT %t = (s32[], s32[]) tuple(%next, %by)
}}

%less (p: s32[], q: s32[]) -> pred[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %cmp = pred[] compare(%p, %q), direction={direction}
}}

%goes_on (s: (s32[], s32[])) -> pred[] {{
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %end = s32[] constant({end})
  ROOT %f = pred[] fusion(%i, %end), kind=kLoop, calls=%less
}}

ENTRY %main (x: s32[]) -> (s32[], s32[]) {{
  %x = s32[] parameter(0)
  %begin = s32[] constant({begin})
  %copied = s32[] copy(%begin)
  %by = {by}
  %start = (s32[], s32[]) tuple(%copied, %by)
  ROOT %loop = (s32[], s32[]) while(%start), condition=%goes_on, body=%step
}}
"""


def trips(begin: int, end: int, direction: str, by: str) -> tuple[int, list[str]]:
    text = BODY.format(begin=begin, end=end, direction=direction, by=by)
    module = read_module(text)
    assert module.loops["step"].trips == max(
        e.count for e in module.executed if e.loops
    )
    return module.loops["step"].trips, module.unread


@pytest.mark.parametrize(
    ("begin", "end", "direction", "by", "expected"),
    [
        (0, 12, "LT", 1, 12),
        (3, 12, "LE", 4, 3),
        (7, 0, "GE", -1, 8),
        (0, 6, "NE", 2, 3),
    ],
)
def test_a_counter_is_run(begin, end, direction, by, expected):
    assert trips(begin, end, direction, f"s32[] constant({by})") == (expected, [])


def test_a_loop_that_depends_on_data_counts_once_and_is_listed():
    assert trips(0, 12, "LT", "s32[] negate(%x)") == (
        *(1, ["trip count of loop: counted as 1"]),
    )


def test_loops_in_loops_multiply():
    """As XLA writes them, on this machine."""

    def step(x, w):
        def layer(x, w):
            return jnp.sin(x @ w), None

        def microbatch(total, x):
            return total + jax.lax.scan(layer, x, w)[0], None

        return jax.lax.scan(microbatch, x[0], x)[0]

    arrays = (jnp.ones((5, 8, 8)), jnp.ones((3, 8, 8)))
    module = read_module(jax.jit(step).lower(*arrays).compile().as_text())
    assert module.unread == []
    assert sorted(loop.trips for loop in module.loops.values()) == [3, 5]
    assert {e.count for e in module.executed if len(e.loops) == 2} == {15}
    outer = next(loop for loop in module.loops.values() if loop.trips == 5)
    assert outer.op_name == "jit(step)/while"


def test_a_collective_that_nothing_executes_is_listed():
    text = """HloModule lost

%gather (p: bf16[4]) -> bf16[16] {
  %p = bf16[4] parameter(0)
  ROOT %g = bf16[16] all-gather(%p), dimensions={0}
}

ENTRY %main (a: bf16[4]) -> bf16[16] {
  %a = bf16[4] parameter(0)
  ROOT %f = bf16[16] another-form(%a), runs=%gather
}
"""
    assert read_module(text).unread == ["g: no executed instruction contains it"]
    assert read_module(text.replace("runs=", "calls=")).unread == []
