"""The picture says what the plan says, whole, escaped, and without a network."""

import json

import pytest

from tests.train.pages import Page
from train.plan.aot import measure_compile
from train.plan.compiled.step import read_step
from train.plan.compiled.trip_counts import read
from train.plan.cost import CollectiveTotal, Flops, HbmBytes, StepCost
from train.plan.layer_schedule import COMPUTE
from train.plan.memory import make_ledger, room_of
from train.plan.page import write_picture
from train.plan.rates import Rates
from train.units import format_bytes, format_flops

RATES = Rates(1e12, 1e11, lambda group: 1e10)


@pytest.fixture(scope="module")
def program(programs):
    return programs("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", devices=8)


@pytest.fixture(scope="module")
def compiled(program):
    found, _ = measure_compile(program)
    return found


@pytest.fixture
def draw(program, compiled, tmp_path):
    """Write a picture and read it back; without `module` nothing was compiled."""

    def draw(executed=None, module=None, **more) -> str:
        path = tmp_path / "plan.html"
        ledger = make_ledger(program, compiled if module else None)
        room = room_of(None, 8, 0.05)
        write_picture(path, program, ledger, room, executed, module, None, **more)
        assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]
        return path.read_text()

    return draw


@pytest.fixture(scope="module")
def module(compiled):
    return read(compiled.as_text())


def test_every_figure_is_there(program, compiled, module, draw):
    executed = read_step(program, compiled.as_text())
    ledger = make_ledger(program, compiled)
    assert executed
    assert ledger.needed
    text = Page(draw(executed, module, rates=RATES)).text
    for name in ("parameters", "optimizer state", "batch"):
        assert f"\n{name}\n{format_bytes(ledger.parts[name].bytes)}\n" in text
    assert f"{format_bytes(ledger.needed.bytes)} a device are needed" in text
    assert f"\n{format_flops(executed.flops.total)}\ncompiled\n" in text
    assert executed.sent
    for total in executed.sent:
        assert f"\n{format_bytes(total.payload)}\n{format_bytes(total.sent)}\n" in text
    for total in executed.outside_layers:
        assert f"\n{total.serves}\n" in text
    assert "\ndata 2 x fsdp 2 x tensor 2\n" in text
    assert f"\n{program.tokens_per_step:,}\n8 x 32\n" in text


def test_a_layer_has_a_lane_for_each_network(module, draw):
    page = Page(draw(module=module, rates=RATES))
    assert "Forward: " in page.text
    assert "Backward: " in page.text
    for lane in (COMPUTE, "memory: fsdp", "memory: tensor"):
        assert f"\n{lane}, busy " in page.text
    tips = [str(value) for name, value in page.attributes if name == "data-tip"]
    assert any("FLOPs" in tip for tip in tips)
    assert any("sent of" in tip for tip in tips)


def test_without_a_compiler_the_page_says_so(draw):
    text = Page(draw()).text
    assert "There is no compiled step whose schedule could be shown." in text
    assert "Not known: there is no compiled step." in text
    assert "busy" not in text


def test_without_rates_there_is_no_clock(module, draw):
    text = Page(draw(module=module)).text
    assert "what this machine does in a second is not known." in text


def test_a_rate_that_no_vendor_states_is_named(module, draw):
    def send(group):
        raise ValueError("the vendor of X does not state dcn_bandwidth")

    text = Page(draw(module=module, rates=Rates(1e12, 1e11, send))).text
    assert "Not drawn: the vendor of X does not state dcn_bandwidth." in text


BAD = "</script></pre><script>alert(1)</script><b>'\"&"


def test_hostile_text_stays_text(draw):
    def executed(text: str) -> StepCost:
        total = CollectiveTotal((text,), text, text, 1, 1, 1.0, 0.0, text)
        flops, moved = Flops(1.0, unknown=(text,)), HbmBytes(0, 1)
        return StepCost(1.0, flops, moved, [total], [total], how=text)

    def page(text: str) -> Page:
        more = {"rows": [(text, text)], "command": [text]}
        return Page(draw(executed(text), **more))

    bad = page(BAD)
    assert bad.tags == page("x").tags
    assert bad.text.count(BAD) >= 5


def test_the_layout_is_data_that_the_script_can_read(program, draw):
    page = Page(draw())
    (text,) = [script for script in page.scripts if script.startswith("{")]
    data = json.loads(text)
    assert data["axes"] == [[k, v] for k, v in program.mesh.shape.items()]
    options = page.tags.count("option")
    assert options == len(data["arrays"])


def test_nothing_is_fetched(module, draw):
    html = draw(module=module, rates=RATES)
    page = Page(html)
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    for fetched in ("http:", "https:", "url(", "@import", "import(", "fetch("):
        assert fetched not in html
    assert len(html) < 100_000


def test_every_kind_has_a_color_in_both_lights(draw):
    html = draw()
    light, dark = html.split("@media (prefers-color-scheme: dark)")
    for kind in ("product", "attention", "memory", "wait", "all-gather", "other"):
        assert light.count(f"--k-{kind}: #") == 1
        assert dark.count(f"--k-{kind}: #") == 1
