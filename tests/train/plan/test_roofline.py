"""Steps that one resource bounds, each by hand; and the rates of devices."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.machines import execution, in_one_section, machine, total
from train.hardware.achievable import HOPPER, slowest_ratio
from train.hardware.achievable import TPU as OF_TPU
from train.hardware.chips import CHIPS
from train.hardware.devices import fake_devices
from train.hardware.interconnect import Group, NotStated
from train.hardware.targets import parse_target
from train.plan.rates import BusyTimes, Link, depth_fill, matrix_fill, rates_of
from train.plan.roofline import GPU_SPREAD, MEMORY, PRODUCTS, predict, time_section
from train.program import make_program

TPU = {"products": 0.865 * 197e12, "memory": 0.85 * 819e9, "ici": 0.74 * 200e9}


@pytest.fixture(scope="module")
def v5e(composed):
    return machine(composed, "v5e-256", "mesh=fsdp", "data.batch_size=256")


def test_what_host_memory_takes_may_be_hidden_or_not(v5e):
    """A second of products, and two of transfers each way at the same time."""
    cost = execution(TPU["products"], 1000, needed=TPU["products"])
    found = v5e.predict(replace(cost, host_bytes=2 * 16 * 10**9))
    (link,) = found.links
    assert (link.name, link.seconds) == ("host memory over PCIe", 2)
    assert found.step_s.low == pytest.approx(2)
    assert found.step_s.high == pytest.approx(3)


def test_a_step_of_products_takes_their_flops_over_the_rate(v5e):
    """Two seconds of products; the gathers have all their time beside them."""
    flops = 2 * TPU["products"]
    sent = total("fsdp", "ICI", TPU["ici"], overlapped=1.0)
    found = v5e.predict(execution(flops, 1000, sent, needed=flops / 1.25))
    assert found.products == pytest.approx(2)
    assert found.step_s.low == pytest.approx(2)
    assert found.step_s.high == pytest.approx(2, rel=1e-6)
    assert found.recomputed == pytest.approx(1.25)
    assert found.middle.mfu == pytest.approx(0.865 / 1.25)
    tokens = v5e.config.data.batch_size * v5e.config.data.sequence_length
    assert found.middle.tokens_per_second == pytest.approx(tokens / 2)
    assert found.middle.tokens_per_second_per_chip == pytest.approx(tokens / 2 / 256)


@pytest.mark.parametrize(
    ("target", "dtype", "rates"),
    [("h100-8", "float8", (989.5e12, 1979e12)), ("v5e-256", "int8", (197e12, 393e12))],
)
def test_products_of_eight_bits_go_at_their_own_rate(composed, target, dtype, rates):
    key = f"model.compute_dtype={dtype}"
    at = machine(composed, target, "mesh=fsdp", "data.batch_size=256", key)
    cost = execution(3e14, 0)
    flops = replace(cost.flops, eight_bits=2e14)
    plain, found = at.predict(cost), at.predict(in_one_section(cost, flops))
    part = at.chip.achievable.products
    saved = 2e14 / part * (1 / rates[0] - 1 / rates[1])
    assert plain.products - found.products == pytest.approx(saved)
    assert found.peak == plain.peak, "MFU is of bfloat16's peak"


def test_rows_grouped_by_expert_take_longer_than_one_product_of_them(composed):
    """A part of the rate, or as long as memory takes to bring the kernel's tiles."""
    took = {}
    for target in ("v5p-32", "v6e-16", "h100-8"):
        at = machine(composed, target, "mesh=fsdp", "data.batch_size=16")
        cost = execution(1e15, 0)
        flops = replace(cost.flops, grouped=4e14)
        plain, found = at.predict(cost), at.predict(in_one_section(cost, flops))
        took[target] = 1 + (found.products - plain.products) / (0.4 * plain.products)
    part = OF_TPU.grouped
    assert took["v5p-32"] == pytest.approx(1 / part.rate)
    v6e = CHIPS["v6e"]
    assert v6e.hbm_bandwidth is not None
    of_memory = part.intensity * OF_TPU.memory * v6e.hbm_bandwidth
    of_units = v6e.achievable.products * v6e.flops["bfloat16"]
    assert took["v6e-16"] == pytest.approx(of_units / of_memory)
    assert took["v6e-16"] > took["v5p-32"] > took["h100-8"] == 1


def test_memory_takes_its_own_time_unless_products_hide_it(v5e):
    """One second of products; three of memory, two of them by products."""
    second = round(TPU["memory"])
    moved = execution(TPU["products"], 3 * second, beside=2 * second)
    found = v5e.predict(moved)
    assert found.memory == pytest.approx(3)
    assert found.step_s.low == pytest.approx(3)
    assert found.step_s.high == pytest.approx(2 + 1)
    serial = v5e.predict(execution(TPU["products"], 3 * second))
    assert serial.step_s.high == pytest.approx(1 + 3)


def test_gathers_that_nothing_is_scheduled_beside_may_add_to_products(v5e):
    """Three seconds of gathers, one of products: between all hidden and none."""
    sent = total("fsdp", "ICI", 3 * TPU["ici"])
    found = v5e.predict(execution(TPU["products"], 0, sent))
    (link,) = found.links
    assert link.seconds == pytest.approx(3)
    assert found.step_s.low == pytest.approx(3)
    assert found.step_s.high == pytest.approx(4)
    half = total("fsdp", "ICI", 3 * TPU["ici"], overlapped=0.5)
    found = v5e.predict(execution(TPU["products"], 0, half))
    assert found.step_s.high == pytest.approx(1.5 + 1.5)


def test_activations_are_waited_for(composed):
    """One second of products, half of one of tensor parallelism: no less than both."""
    overrides = ("mesh=fsdp_tensor", "mesh.tensor=16", "data.batch_size=256")
    at = machine(composed, "v5e-256", *overrides)
    sent = total("tensor", "ICI", 0.5 * 0.74 * 100e9)
    found = at.predict(execution(TPU["products"], 0, sent))
    assert found.step_s.low == pytest.approx(1.5)
    assert found.step_s.high == pytest.approx(1.5)


def test_slices_exchange_gradients_at_the_speed_of_the_network(composed):
    """4 GB a chip over DCN: 3.125 GB/s, a third of which programs get."""
    overrides = ("mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2", "data.batch_size=512")
    at = machine(composed, "v5e-256x2", *overrides)
    sent = total("data", "DCN", 4e9, overlapped=0.25)
    found = at.predict(execution(TPU["products"], 0, sent))
    seconds, start = 4 / (0.33 * 3.125), OF_TPU.hop_s
    hidden = 0.25 * (1 - OF_TPU.unhidden) * seconds
    slow = slowest_ratio(2, OF_TPU.spread)
    assert slow == pytest.approx(1 + 0.014 * 1.177, rel=1e-3)
    (link,) = found.links
    assert (link.seconds, link.hidden) == pytest.approx((seconds + start, hidden))
    assert found.step_s.low == pytest.approx(
        slow * (max(1, hidden) + seconds + start - hidden)
    )
    assert found.step_s.high == pytest.approx(found.step_s.low)


def test_kernels_of_a_gpu_run_one_after_the_other(composed):
    """A second of products, one of memory, one of gathers that nothing hides."""
    overrides = ("mesh=fsdp", "model.attention=xla", "data.batch_size=16")
    at = machine(composed, "h100-8", *overrides)
    fill = depth_fill(at.config.model, 1, HOPPER.half_depth)
    assert 0.9 < fill < 1
    flops = fill * HOPPER.products * 989.5e12
    sent = total("fsdp", "NVLink", 0.8 * 450e9)
    found = at.predict(execution(flops, round(HOPPER.memory * 3350e9), sent))
    assert [found.products, found.memory] == pytest.approx([1, 1])
    (link,) = found.links
    assert link.seconds == pytest.approx(1 + HOPPER.start_s)
    assert found.middle.step_s == pytest.approx(3 + HOPPER.start_s)
    width = (found.step_s.high - found.step_s.low) / found.middle.step_s
    assert width == pytest.approx(2 * GPU_SPREAD)


def test_memory_of_one_section_does_not_hide_under_products_of_another(v5e):
    """Two seconds of products in the layers, then one of memory in the loss."""
    layers = execution(2 * TPU["products"], round(0.5 * TPU["memory"]))
    loss = execution(0.5 * TPU["products"], round(TPU["memory"]))
    cost = replace(layers, sections=layers.sections + loss.sections)
    found = v5e.predict(cost)
    assert (found.products, found.memory) == pytest.approx((2.5, 1.5))
    assert [section.bound_by for section in found.sections] == [PRODUCTS, MEMORY]
    assert found.step_s.low == pytest.approx(2 + 1)
    assert found.step_s.high == pytest.approx(2.5 + 1.5)


def test_gathers_of_one_section_do_not_hide_under_products_of_another(v5e):
    layers = execution(2 * TPU["products"], 0, total("fsdp", "ICI", TPU["ici"]))
    update = execution(0, 0, total("fsdp", "ICI", TPU["ici"]), needed=1.0)
    cost = replace(layers, sections=layers.sections + update.sections)
    found = v5e.predict(cost)
    (link,) = found.links
    assert link.seconds == pytest.approx(2)
    assert found.step_s.low == pytest.approx(2 + 1)
    assert found.sections[1].bound_by == "fsdp over ICI"


def test_transfers_to_the_host_may_hide_under_all_sections(v5e):
    one = execution(TPU["products"], 0)
    cost = replace(one, sections=2 * one.sections, host_bytes=3 * 16 * 10**9)
    found = v5e.predict(cost).step_s
    assert (found.low, found.high) == pytest.approx((3, 2 + 3))


def test_the_update_of_a_compiled_step_does_not_hide_under_its_layers(stored_step):
    step = stored_step("ddp_full")
    cost = step.cost
    place = step.program.config, step.program.mesh, CHIPS["v5e"]
    found, overlapped = predict(cost, *place), predict(in_one_section(cost), *place)
    *others, update = found.sections
    assert [section.bound_by for section in others] == [PRODUCTS] * 3
    assert (update.name, update.bound_by) == ("embedding and update", MEMORY)
    assert update.memory < overlapped.products == overlapped.step_s.low
    assert found.step_s.low == pytest.approx(overlapped.step_s.low + update.memory)


def test_devices_of_one_chip_share_its_rates(composed):
    at = machine(composed, "tpu7x-128", "mesh=fsdp", "data.batch_size=128")
    found = at.predict(execution(0.865 * 2307e12 / 2, round(0.85 * 7380e9 / 2)))
    assert [found.products, found.memory] == pytest.approx([1, 1])
    assert (found.devices, found.chips) == (128, 64)


def test_small_dims_leave_matrix_units_idle(composed):
    """Llama 3.2 1B has heads of 64: half of a unit of 128."""
    model = composed("model=llama3_1b").model
    products, attention = matrix_fill(model, 1, 128)
    assert attention == 0.5
    assert products == 1
    assert matrix_fill(model, 1, 256)[1] == 0.25
    # 16 ways a device has 2 heads, 1 key head, 512 of the MLP's columns, 8016 words.
    used = 16 * (2 * 128 + 2 * 64 + 3 * 512) + 8016
    taken = 16 * (2 * 256 + 2 * 256 + 3 * 512) + 8192
    assert matrix_fill(model, 16, 256)[0] == pytest.approx(used / taken)
    assert matrix_fill(model, 16, None) == (1, 1)


def test_a_token_goes_through_its_experts_not_through_one_wide_mlp(composed):
    """Eight ways: of Qwen3's 8 experts of 768 a device has 96 columns each."""
    attention, head = (2 * 512 + 2 * 128, 2 * 512 + 2 * 256), (18992, 19200)
    more = ("model.shared_experts=2", "model.dense_layers=1", "model.mlp_dim=6144")
    for overrides, mlps in (
        ((), (48 * 24 * 96, 48 * 24 * 256)),
        (more, (47 * 3 * (8 * 96 + 192) + 3 * 768, 47 * 3 * (8 + 1) * 256 + 3 * 768)),
    ):
        model = composed("model=qwen3_30b_a3b", *overrides).model
        parts = zip(attention, mlps, head, strict=True)
        used, taken = (48 * a + b + c for a, b, c in parts)
        assert matrix_fill(model, 8, 256)[0] == pytest.approx(used / taken)


times = st.floats(0, 100)


@given(
    times, times, st.floats(0, 1), st.lists(st.tuples(times, *[st.floats(0, 1)] * 2))
)
def test_ranges_are_in_order(products, memory, beside, networks):
    links = [
        Link(("fsdp",), "ICI", 1, 1, s, s * hidden, s * (1 - hidden) * waits)
        for s, hidden, waits in networks
    ]
    busy = BusyTimes(products, memory, memory * beside, tuple(links), fill=1.0)
    found = time_section("loss", busy).seconds
    assert found.low <= found.high * (1 + 1e-9) + 1e-9
    assert found.low <= found.middle * (1 + 1e-9) + 1e-9


def test_all_figures_are_plain_values(v5e):
    sent = total("fsdp", "ICI", TPU["ici"])
    found = v5e.predict(execution(TPU["products"], 1000, sent)).as_json()
    assert json.loads(json.dumps(found))["middle"]["mfu"] == found["middle"]["mfu"]
    assert found["how"] == "compiled"


@pytest.fixture
def mesh(configure, monkeypatch):
    """(target, *overrides) -> its mesh, on stand-ins."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def mesh(target, *overrides):
        config = configure("model.attention=xla", "mesh=fsdp", *overrides)
        return make_program(config, fake_devices(parse_target(target))).mesh

    return mesh


def test_rates_are_of_one_device_and_what_programs_get(mesh):
    chip, part = CHIPS["tpu7x"], OF_TPU
    rates = rates_of(mesh("tpu7x-8"), chip)  # two devices a chip
    assert rates.flops == pytest.approx(part.products * 2307e12 / 2)
    assert rates.memory == pytest.approx(part.memory * 7380e9 / 2)


def test_all_links_of_a_gpu_and_its_own_card(mesh):
    part = HOPPER
    here = mesh("h100-4x2", "mesh.data=2", "mesh.fsdp=4", "mesh.dcn.data=2")
    send = rates_of(here, CHIPS["h100"]).send
    assert send(Group(("fsdp",), 4, "NVLink")) == pytest.approx(part.links * 450e9)
    assert send(Group(("data",), 2, "network")) == pytest.approx(part.network * 50e9)


def test_what_the_vendor_does_not_state_is_said(mesh):
    with pytest.raises(NotStated, match="v2: its vendor does not state hbm_bandwidth"):
        rates_of(mesh("v5e-4"), CHIPS["v2"])
    send = rates_of(mesh("v4-8"), CHIPS["v4"]).send
    with pytest.raises(NotStated, match="dcn_bandwidth"):
        send(Group(("data",), 2, "DCN"))
