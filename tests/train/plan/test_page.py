"""The page says what the plan says, whole and escaped."""

import pytest

from tests.train.compiled import in_one
from tests.train.pages import drawn
from train.plan.compiled.trip_counts import read_module
from train.plan.layer_schedule import COMPUTE, MEMORY, PRODUCT, WAIT, Span, Timeline
from train.plan.page import TEMPLATE, layers_data, merge, page_data, pass_data
from train.run.page import write_page

SENT = {
    **{"axes": ["fsdp"], "network": "ICI", "kind": "all-gather", "count": 1200},
    **{"payload": 2048, "sent": 1024.0, "overlapped": 0.5, "serves": "head"},
}
WORK = {
    **{"products": 3e9, "attention": 1e9, "unknown": ["a kernel"]},
    **{"memory_bytes": 5120, "product_bytes": 0},
}
HELD = {"parameters": 100, "optimizer state": 200, "batch": 10, "gradients": 100}


def span(kind: str, start: float, seconds: float, label: str = "x") -> Span:
    return Span(COMPUTE, kind, start, seconds, label, "detail")


def figures(sizes: dict[str, int], how: str = "compiled") -> dict[str, dict]:
    return {name: {"bytes": size, "how": how} for name, size in sizes.items()}


def memory(needed: int, available: int = 800, **compiled: int) -> dict:
    """What a plan says of memory: a device of 1000 bytes, 900 of them a program's."""
    per_device = figures(HELD, "computed") | figures(compiled)
    return {
        "fits": needed <= available,
        "memory": {"total": 1000, "program": 900, "available": available, "note": ""},
        "per_device": per_device,
        "needed": {"bytes": needed, "how": "compiled"},
        "temporaries": figures({"one layer": 7, "logits": 0}),
        **figures({"host_save": 7, "checkpoint": 8}),
        "host": figures({"optimizer state": 5}),
        "host_held_bytes": 40,
    }


@pytest.fixture
def draw(programs, tmp_path):
    """Draw a plan of eight devices with what a test says otherwise: its page."""

    def draw(**changes):
        program = programs("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", devices=8)
        execution = {
            **{"model_flops": 2e9, "work": WORK, "executed_over_model_flops": 2.0},
            **{"sent": [SENT], "outside_layers": [SENT], "unread": [], "how": "read"},
        }
        plan = {
            **{"target": "v5e-8", "device_kind": "TPU v5 lite", "platform": "tpu"},
            **{"devices": 8, "hosts": 2, "slices": 1, "mesh": dict(program.mesh.shape)},
            **{"num_parameters": 124_000_000, "tokens_per_step": 256},
            **{"model_flops_per_step": 16e9, "execution": execution, **memory(700)},
            **page_data(program, None, [("MFU", "40%")], ["target=v5e-8"]),
        }
        write_page(tmp_path / "plan.html", TEMPLATE, plan | changes)
        return drawn((tmp_path / "plan.html").read_text())

    return draw


def test_every_figure_is_there(draw):
    text = draw().text
    for figure in (
        *("Plan: 124M parameters on v5e-8", "python -m train.plan target=v5e-8"),
        *("yes\n100 B to spare, compiled", "8\nTPU v5 lite, 2 hosts"),
        *("data 2 x fsdp 2 x tensor 2", "256\n8 x 32", "16 GFLOPs", "MFU\n40%"),
        *("parameters\n100 B\n10.0%\ncomputed", "one layer\n7 B\nTogether\n7 B"),
        "Executed\n4 GFLOPs\nread\nExecuted in products\n3 GFLOPs\nread\n"
        "Executed in attention kernels\n1 GFLOPs\nread\n"
        "Executed over model\n2.00\nread",
        *("Kernels without a count\na kernel\nread",),
        "head\nfsdp\nICI\nall-gather\n1,200\n2.00 KiB\n1.00 KiB\n50%",
    ):
        assert f"\n{figure}\n" in f"\n{text}"
    assert "seed: 0\n" in text
    assert "logits" not in text
    assert "There is no compiled step whose schedule could be shown." in text
    assert "\n[384 over tensor, 32 over fsdp] float32, 12.00 KiB a device, cut" in text


@pytest.mark.parametrize(
    ("temporaries", "pieces"),
    [
        (150, {"gradients": 100, "activations and buffers": 50}),
        # Gradients that never all exist at once are no piece of their own.
        (50, {"activations and buffers": 50}),
    ],
)
def test_pieces_of_memory_add_up_to_what_is_needed(draw, temporaries, pieces):
    sizes = {"arguments": 320, "temporaries": temporaries, "outputs": 4, "code": 6}
    page = draw(**memory(sum(sizes.values()), **sizes))
    held = {name: size for name, size in HELD.items() if name != "gradients"}
    expected = held | {"padding of these": 10} | pieces | {"outputs": 4, "code": 6}
    titles = [value for name, value in page.attributes if name == "title"]
    assert titles == [f"{name}: {size} B" for name, size in expected.items()]
    assert sum(expected.values()) == sum(sizes.values())


def test_parts_stand_below_their_sum_and_in_no_table_of_another(draw):
    """The estimate of temporaries may be more than the compiler has."""
    sizes = {"arguments": 320, "temporaries": 50, "outputs": 4, "code": 6}
    items = figures({"one layer": 40, "gradients": 30}, "estimated")
    text = draw(**memory(380, **sizes) | {"temporaries": items}).text
    assert "\ncode\n6 B\n0.6%\ncompiled\nWhat the temporaries hold" in text
    assert "one layer\n40 B\ngradients\n30 B\nTogether\n70 B\n" in text
    assert "of these: " not in text


def test_neighbours_join_what_is_alone_stays_and_specks_go():
    spans = [
        span(PRODUCT, 0, 1),
        span(PRODUCT, 1, 1),
        span(MEMORY, 2.2, 0.001),
        span(PRODUCT, 2.5, 1),
        span(PRODUCT, 3.5, 1, "y"),
        span(WAIT, 4.5, 1),
    ]
    merged = [(s.kind, s.start_s, s.seconds, s.label) for s in merge(spans, 0.1)]
    assert merged == [
        (PRODUCT, 0, 2, "x"),
        (PRODUCT, 2.5, 1, "x"),
        (PRODUCT, 3.5, 1, "y"),
        (WAIT, 4.5, 1, "x"),
    ]
    assert merge(spans, 0.1)[0].detail == "detail, and 1 more"


@pytest.mark.parametrize("kinds", [(MEMORY,), (MEMORY, WAIT)])
def test_thousands_of_small_spans_show_as_one(kinds):
    spans = [span(kinds[n % len(kinds)], n / 1000, 0.0009) for n in range(10_000)]
    (merged,) = merge(spans, 0.01)
    assert merged.seconds == pytest.approx(9.9999)


def test_a_layer_is_drawn_on_the_clock(draw):
    label = "mlp</i><b>"
    spans = [span(PRODUCT, 0, 2e-3, label), span(WAIT, 2e-3, 4e-4, "waits")]
    spans.append(Span("ICI: fsdp", "all-gather", 0, 2.4e-3, "gather", "1 KiB"))
    passes = [pass_data(Timeline("forward", 12, spans))]
    layers = {"missing": "", "flops": 197e12, "memory": 8e11, "passes": passes}
    page = draw(layers=layers)
    for text in (
        *("Forward: 2.40 ms, 12 times", "compute, busy 2.00 ms (83%)"),
        *("ICI: fsdp, busy 2.40 ms (100%)", f"{label}\ncompute\n1\n2.00 ms\n83%"),
        "2.00 ms with products and attention, 400.0 µs waiting (17%)",
    ):
        assert f"\n{text}\n" in page.text
    assert ("data-tip", f"{label}\ndetail\n2.00 ms from 0 on") in page.attributes
    assert "197 TFLOP/s" in page.text


def test_what_xla_made_of_it_is_shown_if_asked_for(draw):
    assert "What XLA made of it" not in draw().text
    buffer = {"bytes": 2048, "array": "f32[512]", "made": "a <b>"}
    found = {"sentences": [("in place", "all 3 arrays")], "buffers": [buffer]}
    text = draw(inspection=found).text
    assert "\nWhat XLA made of it\nin place\nall 3 arrays\n" in text
    assert "\nf32[512]\n2.00 KiB\na <b>\n" in text


def test_why_there_is_no_clock_is_said(programs):
    program = programs("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", devices=8)
    module = read_module(in_one("  ROOT %a = f32[1] parameter(0)"))
    why = "Not drawn: the rates of this machine are not known."
    assert layers_data(program, module) == {"missing": why}
