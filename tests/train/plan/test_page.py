"""The page shows every figure of a plan, and escapes its labels."""

import dataclasses
import math
import re

import pytest

from data.program import PREFIX
from model.params import named
from tests.train.pages import Page, drawn
from train.page import write_page
from train.plan.estimated.step import estimate_step
from train.plan.layer_schedule import COMPUTE, PRODUCT, WAIT, Span, Timeline
from train.plan.page import TEMPLATE, layers_data, page_data
from train.plan.plan import estimate
from train.units import format_bytes, format_flops

HELD = {"parameters": 100, "optimizer state": 200, "batch": 10, "gradients": 100}


@pytest.fixture
def plan(configure, lay_out):
    cube = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "model.attention=xla")
    return estimate(lay_out(configure(cube), "v5e-8"))


@pytest.fixture
def draw(plan, tmp_path):
    """Return a function that draws a plan's page with some values changed."""

    def draw(**changes) -> Page:
        values = {"target": "v5e-8", "slices": 1, "inspection": None, **plan.as_json()}
        values["verdict"] = plan.verdict._asdict()
        values |= page_data(plan, ["target=v5e-8"]) | changes
        write_page(tmp_path / "plan.html", TEMPLATE, values)
        return drawn((tmp_path / "plan.html").read_text())

    return draw


def test_the_figures_of_a_plan_are_shown(draw, plan):
    text = draw().text
    parameters = plan.memory.parts["parameters"]
    for figure in (
        *(f"python -m {PREFIX}train.plan target=v5e-8", "data 2 x fsdp 2 x tensor 2"),
        *("256\n8 x 32", f"parameters\n{format_bytes(parameters.bytes)}"),
        *(plan.advice.bottleneck, plan.memory.needed.how, "v5e-8", "seed: 0"),
        format_flops(plan.cost.flops.total),
        "There is no compiled step whose schedule could be shown.",
    ):
        assert figure in text
    for total in plan.cost.sent:
        row = " ".join(total.axes), total.network, total.kind, f"{total.count:,}"
        assert "\n".join([*row, format_bytes(total.payload)]) in text


def test_the_page_says_how_each_array_is_sharded(draw, plan):
    text = draw().text
    program = plan.program
    leaves = dict(named(program.state.params))
    leaves |= dict(named({"batch": program.batch._asdict()}))
    for name, leaf in leaves.items():
        shard = leaf.sharding.shard_shape(leaf.shape)
        parts = math.prod(leaf.shape) // math.prod(shard)
        (row,) = re.findall(
            rf"^{re.escape(name)}\n(\[.*\])\n(.*)\n(.*)\n(.*)$", text, re.M
        )
        dims, *figures = row
        assert re.findall(r"(?:\[| )(\d+)", dims) == [str(size) for size in leaf.shape]
        size = format_bytes(math.prod(shard) * leaf.dtype.itemsize)
        assert figures == [
            str(leaf.dtype),
            str(parts) if parts > 1 else "whole on each",
            size,
        ]
    assert "\n[384 over tensor, 32 over fsdp]\nfloat32\n4\n12.00 KiB\n" in text
    assert "\n[8 over data and fsdp, 32]\nint32\n4\n256 B\n" in text


@pytest.mark.parametrize(
    ("temporaries", "pieces"),
    [
        (150, {"gradients": 100, "activations and buffers": 50}),
        # Gradients are no separate piece if they never all exist at once.
        (50, {"activations and buffers": 50}),
    ],
)
def test_pieces_of_memory_add_up_to_the_needed_bytes(draw, temporaries, pieces):
    sizes = {"arguments": 320, "temporaries": temporaries, "outputs": 4, "code": 6}
    needed = {"bytes": sum(sizes.values()), "how": "compiled"}
    parts = {name: {**needed, "bytes": n} for name, n in (HELD | sizes).items()}
    page = draw(per_device=parts, needed=needed)
    arguments = {name: size for name, size in HELD.items() if name != "gradients"}
    expected = arguments | {"padding of these": 10} | pieces | {"outputs": 4, "code": 6}
    titles = [value for name, value in page.attributes if name == "title"]
    assert titles == [f"{name}: {size} B" for name, size in expected.items()]
    assert sum(expected.values()) == sum(sizes.values())


def test_a_layer_is_drawn_to_scale_and_its_labels_are_escaped(draw):
    label = "mlp</i><b>"
    compute = [Span(PRODUCT, label, 0.0, 2e-3), Span(WAIT, "waits", 2e-3, 4e-4)]
    lanes = {COMPUTE: compute, "ICI: fsdp": [Span("all-gather", "x", 0.0, 2.4e-3)]}
    passes = [dataclasses.asdict(Timeline("forward", 12, 2.4e-3, lanes))]
    layers = {"missing": "", "flops": 197e12, "memory": 8e11, "passes": passes}
    page = draw(layers=layers)
    for text in (
        *("Forward: 2.40 ms, 12 times", "compute, busy 2.00 ms (83%)"),
        *("ICI: fsdp, busy 2.40 ms (100%)", label),
    ):
        assert f"\n{text}\n" in page.text
    assert ("data-tip", f"{label}\n2.00 ms from 0 on") in page.attributes


def test_a_compiled_step_has_a_timeline_of_each_pass(stored_step, plan, draw):
    step = stored_step("fsdp")
    compiled = dataclasses.replace(
        plan, program=step.program, text=step.text, cost=estimate_step(step.program)
    )
    text = draw(layers=layers_data(compiled)).text
    assert "\nForward: " in text
    assert "\nBackward: " in text
    assert "\nICI: fsdp, busy " in text
