"""The timelines of small schedules show the right overlap and waits."""

import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from train.plan.compiled.trip_counts import read_module
from train.plan.cost import Flops, HbmBytes, SectionCost
from train.plan.estimated.step import estimate_step
from train.plan.layer_schedule import (
    ATTENTION,
    COMPUTE,
    PRODUCT,
    WAIT,
    Timeline,
    layer_timelines,
)
from train.plan.rates import Rates

SIDE = 64
DOT_FLOPS = 2 * SIDE**3
SENT = 7 / 8 * 4 * SIDE**2  # Each of eight devices sends it to gather a matrix.
NAME = (
    'metadata={op_name="jit(train_step)/jvp(layers)/while/body/part.mlp/part.up/dot"}'
)
DOT = f"lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {NAME}"
ALL = f"replica_groups={{{{0,1,2,3,4,5,6,7}}}}, {NAME}"
MATRIX = f"f32[{SIDE},{SIDE}]{{1,0}}"
SHARD = f"f32[8,{SIDE}]{{1,0}}"
LAYERS = 'metadata={op_name="jit(train_step)/jvp(layers)/while"}'
STATE = f"(s32[], {MATRIX})"
LOOP = 'backend_config={"known_trip_count":{"n":"3"}}'
START = f"({SHARD}, {MATRIX}) all-gather-start(%w), {ALL}"
GATHER = (
    f"%start = {START}",
    f"%a = {MATRIX} dot(%x, %x), {DOT}",
    f"%done = {MATRIX} all-gather-done(%start)",
    f"%b = {MATRIX} dot(%a, %done), {DOT}",
)


def loop_body(name: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"""
%{name} (state: {STATE}) -> {STATE} {{
  %state = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = {MATRIX} get-tuple-element(%state), index=1
  %w = {SHARD} constant({{...}})
{body}
  ROOT %out = {STATE} tuple(%i, %x)
}}
"""


def simulate(
    body: Sequence[str], send_s: float = 1.0, inner: Sequence[str] = ()
) -> Timeline:
    """Simulate a layer whose products take a second and whose gathers take `send_s`.

    Three layers run in a loop; `inner` is the body of a loop of three trips in each.
    """
    module = read_module(
        f"""HloModule layers

%gather (w: {SHARD}) -> {MATRIX} {{
  %w = {SHARD} parameter(0)
  ROOT %all = {MATRIX} all-gather(%w), {ALL}, chain_id="1", kind=AsyncCollectiveStart
}}
{loop_body("inner", inner)}{loop_body("body", body)}
%cond (state: {STATE}) -> pred[] {{
  %state = {STATE} parameter(0)
  ROOT %on = pred[] constant(true)
}}

ENTRY %main (start: {STATE}) -> {STATE} {{
  %start = {STATE} parameter(0)
  ROOT %layers = {STATE} while(%start), condition=%cond, body=%body, {LAYERS}, {LOOP}
}}"""
    )
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    rates = Rates(DOT_FLOPS, math.inf, lambda group: SENT / send_s, 2 * DOT_FLOPS)
    section = SectionCost("layers forward", Flops(0.0), HbmBytes(), [])
    (layer,) = layer_timelines(module, mesh, rates, [section])
    return layer


def lane_spans(timeline: Timeline, name: str) -> list[tuple]:
    spans = timeline.lanes[name]
    return [(s.kind, round(s.start_s, 6), round(s.seconds, 6)) for s in spans]


@pytest.mark.parametrize(("send_s", "wait"), [(0.5, []), (1.5, [(WAIT, 1, 0.5)])])
def test_a_layer_waits_for_the_part_of_a_gather_that_no_product_hides(send_s, wait):
    layer = simulate(GATHER, send_s=send_s)
    end = max(1, send_s)
    assert (layer.name, layer.trips) == ("forward", 3)
    assert layer.seconds == pytest.approx(end + 1)
    assert lane_spans(layer, "memory: fsdp") == [("all-gather", 0, send_s)]
    assert lane_spans(layer, COMPUTE) == [(PRODUCT, 0, 1), *wait, (PRODUCT, end, 1)]
    labels = [span.label for span in layer.lanes[COMPUTE] if span.kind == WAIT]
    assert labels == ["waits for all-gather mlp.up"] * len(wait)


def test_a_synchronous_collective_is_not_hidden():
    add = f"%sum = {MATRIX} all-reduce(%b), {ALL}"
    layer = simulate([*GATHER, add], send_s=0.5)
    # An all-reduce sends twice the bytes of a gather.
    assert lane_spans(layer, "memory: fsdp")[-1] == ("all-reduce", 2, 1)
    assert lane_spans(layer, COMPUTE)[-1] == (WAIT, 2, 1)


def test_a_gather_without_a_waiter_ends_with_the_layer():
    fused = f"%a = {MATRIX} fusion(%w), kind=kCustom, calls=%gather, {NAME}"
    layer = simulate([fused, GATHER[1].replace("%a", "%b")], send_s=4)
    assert layer.seconds == 4
    assert lane_spans(layer, COMPUTE) == [(PRODUCT, 0, 1), (WAIT, 1, 3)]


def test_a_loop_in_a_layer_runs_all_its_trips():
    loop = f"%loop = {STATE} while(%state), condition=%cond, body=%inner, {LOOP}"
    layer = simulate([loop], inner=GATHER, send_s=2)
    assert layer.seconds == 9
    assert lane_spans(layer, "memory: fsdp") == [("all-gather", 0, 6)]
    assert lane_spans(layer, COMPUTE) == [
        (PRODUCT, 0, 3),
        (WAIT, 3, 3),
        (PRODUCT, 6, 3),
    ]


def test_lanes_of_a_tpu_step(stored_step):
    """No lane does two things at once, and kernels take the time of their FLOPs."""
    step = stored_step("fsdp")
    rates = Rates(197e12, 1e15, lambda group: 5e10, 4e14)
    cost = estimate_step(step.program)
    mesh = step.program.mesh
    layers = layer_timelines(step.module, mesh, rates, cost.sections)
    flops = {section.name: section.flops.attention for section in cost.sections}
    assert [layer.name for layer in layers] == ["forward", "backward"]
    for layer in layers:
        assert {"ICI: fsdp", COMPUTE} <= layer.lanes.keys()
        for spans in layer.lanes.values():
            for first, second in itertools.pairwise(spans):
                assert first.end_s <= second.start_s * (1 + 1e-9)
        busy = sum(span.seconds for span in layer.lanes[COMPUTE])
        assert busy == pytest.approx(layer.seconds)  # It works or waits.
        attention_s = flops[f"layers {layer.name}"] / rates.flops / layer.trips
        kernels = [s.seconds for s in layer.lanes[COMPUTE] if s.kind == ATTENTION]
        assert sum(kernels) == pytest.approx(attention_s)
