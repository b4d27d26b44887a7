"""Overlap and waits on the clock, on schedules small enough to follow by hand."""

import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from train.hardware.interconnect import Group
from train.plan.compiled.trip_counts import read_module
from train.plan.layer_schedule import (
    COMPUTE,
    COPIES,
    MEMORY,
    PRODUCT,
    WAIT,
    Timeline,
    layer_timelines,
)
from train.plan.rates import Rates

SIDE = 64
DOT_FLOPS = 2 * SIDE**3
SENT = 7 / 8 * 4 * SIDE**2  # by each of eight that gather a matrix
NAME = (
    'metadata={op_name="jit(train_step)/jvp(layers)/while/body/part.mlp/part.up/dot"}'
)
DOT = f"lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {NAME}"
ALL = f"replica_groups={{{{0,1,2,3,4,5,6,7}}}}, {NAME}"
MATRIX, SHARD = f"f32[{SIDE},{SIDE}]{{1,0}}", f"f32[8,{SIDE}]{{1,0}}"
STATE = f"(s32[], {MATRIX})"
LOOP = 'backend_config={"known_trip_count":{"n":"3"}}'
START = f"({SHARD}, {MATRIX}) all-gather-start(%w), {ALL}"
GATHER = (
    f"%start = {START}",
    f"%a = {MATRIX} dot(%x, %x), {DOT}",
    f"%done = {MATRIX} all-gather-done(%start)",
    f"%b = {MATRIX} dot(%a, %done), {DOT}",
)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:8]), ("fsdp",))


def module(*body: str, inner: tuple[str, ...] = ()):
    """A loop over three layers; `inner` is the body of a loop of three trips in it."""

    def loop_body(name: str, lines: tuple[str, ...]) -> list[str]:
        return [
            f"%{name} (state: {STATE}) -> {STATE} {{",
            f"  %state = {STATE} parameter(0)",
            "  %i = s32[] get-tuple-element(%state), index=0",
            f"  %x = {MATRIX} get-tuple-element(%state), index=1",
            f"  %w = {SHARD} constant({{...}})",
            *(f"  {line}" for line in lines),
            f"  ROOT %out = {STATE} tuple(%i, %x)",
            "}",
            "",
        ]

    name = 'metadata={op_name="jit(train_step)/jvp(layers)/while"}'
    lines = [
        "HloModule layers",
        "",
        f"%gather (w: {SHARD}) -> {MATRIX} {{",  # the first piece of several (TPU)
        f"  %w = {SHARD} parameter(0)",
        f'  ROOT %all = {MATRIX} all-gather(%w), {ALL}, chain_id="1",'
        " kind=AsyncCollectiveStart",
        "}",
        "",
        *loop_body("inner", inner),
        *loop_body("body", body),
        f"%cond (state: {STATE}) -> pred[] {{",
        f"  %state = {STATE} parameter(0)",
        "  ROOT %on = pred[] constant(true)",
        "}",
        "",
        f"ENTRY %main (start: {STATE}) -> {STATE} {{",
        f"  %start = {STATE} parameter(0)",
        f"  ROOT %layers = {STATE} while(%start), condition=%cond, body=%body, {name},"
        f" {LOOP}",
        "}",
    ]
    return read_module("\n".join(lines))


def rates(send_s: float, memory: float = math.inf) -> Rates:
    """A product takes a second, a gathered matrix `send_s`."""
    return Rates(DOT_FLOPS, memory, lambda group: SENT / send_s, 2 * DOT_FLOPS)


def lane(timeline: Timeline, name: str) -> list[tuple]:
    spans = [span for span in timeline.spans if span.lane == name]
    return [(s.kind, round(s.start_s, 6), round(s.seconds, 6)) for s in spans]


@pytest.mark.parametrize(("send_s", "wait"), [(0.5, []), (1.5, [(WAIT, 1, 0.5)])])
def test_what_a_product_does_not_hide_is_waited_for(mesh, send_s, wait):
    (layer,) = layer_timelines(module(*GATHER), mesh, rates(send_s))
    end = max(1, send_s)
    assert (layer.name, layer.trips) == ("forward", 3)
    assert layer.seconds == pytest.approx(end + 1)
    assert lane(layer, "memory: fsdp") == [("all-gather", 0, send_s)]
    assert lane(layer, COMPUTE) == [(PRODUCT, 0, 1), *wait, (PRODUCT, end, 1)]
    labels = [span.label for span in layer.spans if span.kind == WAIT]
    assert labels == ["waits for all-gather mlp.up"] * len(wait)


def test_a_network_does_one_thing_after_the_other(mesh):
    second = (f"%start.2 = {START}", f"%done.2 = {MATRIX} all-gather-done(%start.2)")
    body = (GATHER[0], second[0], *GATHER[1:], second[1])
    (layer,) = layer_timelines(module(*body), mesh, rates(1.5))
    gathers = [("all-gather", 0, 1.5), ("all-gather", 1.5, 1.5)]
    assert lane(layer, "memory: fsdp") == gathers
    assert lane(layer, COMPUTE)[-1] == (WAIT, 2.5, 0.5)


def test_nothing_hides_what_is_synchronous(mesh):
    add = f"%sum = {MATRIX} all-reduce(%b), {ALL}"
    (layer,) = layer_timelines(module(*GATHER, add), mesh, rates(0.5))
    assert lane(layer, "memory: fsdp")[-1] == ("all-reduce", 2, 1)  # twice the bytes
    assert lane(layer, COMPUTE)[-1] == (WAIT, 2, 1)


def test_what_nobody_waits_for_ends_with_the_layer(mesh):
    fused = f"%a = {MATRIX} fusion(%w), kind=kCustom, calls=%gather, {NAME}"
    (layer,) = layer_timelines(
        module(fused, GATHER[1].replace("%a", "%b")), mesh, rates(4)
    )
    assert layer.seconds == 4
    assert lane(layer, COMPUTE) == [(PRODUCT, 0, 1), (WAIT, 1, 3)]


def test_a_copy_runs_beside_and_a_loop_inside_runs_all_its_trips(mesh):
    copy = f"({MATRIX}, {MATRIX}, u32[]) copy-start(%x)"
    body = (
        f"%copy-start = {copy}",
        f"%loop = {STATE} while(%state), condition=%cond, body=%inner, {LOOP}",
        f"%copy-done = {MATRIX} copy-done(%copy-start)",
    )
    moved = 2 * 4 * SIDE**2
    dot_bytes = 3 * 4 * SIDE**2  # slower than the product's FLOPs at this rate
    (layer,) = layer_timelines(
        module(*body, inner=GATHER[1:2]), mesh, rates(1, moved / 9)
    )
    assert lane(layer, COPIES) == [(MEMORY, 0, 9)]
    each = 9 * dot_bytes / moved
    assert lane(layer, COMPUTE) == [(PRODUCT, n * each, each) for n in range(3)]


def test_a_step_without_a_loop_over_layers_has_no_timeline(mesh):
    text = "HloModule m\n\nENTRY %main (a: f32[1]) -> f32[1] {\n"
    text += "  ROOT %a = f32[1]{0} parameter(0)\n}"
    assert layer_timelines(read_module(text), mesh, rates(1)) == []


def check_invariants(step) -> list[Timeline]:
    def send(group: Group) -> float:
        return 50e9 if group.size > 1 else math.inf

    timelines = layer_timelines(
        step.module, step.program.mesh, Rates(197e12, 819e9, send, 393e12)
    )
    for layer in timelines:
        lanes = {span.lane for span in layer.spans}
        for name in lanes:
            spans = [span for span in layer.spans if span.lane == name]
            for before, after in itertools.pairwise(spans):
                assert before.start_s + before.seconds <= after.start_s * (1 + 1e-9)
            busy = sum(span.seconds for span in spans)
            assert busy <= layer.seconds * (1 + 1e-9)
            if name == COMPUTE:  # works or waits, from start to end
                assert busy == pytest.approx(layer.seconds)
    return timelines


def test_lanes_of_a_tpu_step(stored_step):
    forward, backward = check_invariants(stored_step("fsdp"))
    assert (forward.name, backward.name) == ("forward", "backward")
    assert forward.trips == backward.trips > 1
    assert {"ICI: fsdp", COMPUTE} <= {span.lane for span in forward.spans}
    assert backward.busy("attention") > forward.busy("attention") > 0
