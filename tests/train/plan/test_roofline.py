"""Predictions for steps that one resource bounds follow from simple formulas."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.machines import execution, in_one_section, machine, total
from train.hardware.achievable import HOPPER, TPU, slowest_ratio
from train.hardware.chips import CHIPS
from train.hardware.interconnect import NotStated
from train.plan.rates import BusyTimes, Link
from train.plan.roofline import GPU_SPREAD, MEMORY, PRODUCTS, predict, time_section

PRODUCT_RATE = 0.865 * 197e12
MEMORY_RATE = 0.85 * 819e9
ICI_RATE = 0.74 * 200e9


@pytest.fixture(scope="module")
def v5e(composed):
    return machine(composed, "v5e-256", ["mesh=fsdp", "data.batch_size=256"])


def test_transfers_to_host_memory_overlap_with_all_sections(v5e):
    """Each section has a second of products, and transfers take three seconds."""
    one = execution(PRODUCT_RATE, 0)
    cost = replace(one, sections=2 * one.sections, host_bytes=3 * 16 * 10**9)
    prediction = v5e.predict(cost)
    (link,) = prediction.links
    assert (link.name, link.seconds) == ("host memory over PCIe", 3)
    assert prediction.bounds.low == prediction.bounds.high == pytest.approx(3)


def test_a_step_of_products_takes_their_flops_over_the_rate(v5e):
    """Products take two seconds and hide the gathers."""
    flops = 2 * PRODUCT_RATE
    collective = total("fsdp", "ICI", ICI_RATE, overlapped=1.0)
    prediction = v5e.predict(execution(flops, 1000, collective, needed=flops / 1.25))
    assert prediction.products == pytest.approx(2)
    assert prediction.bounds.low == pytest.approx(2)
    assert prediction.bounds.high == pytest.approx(2, rel=1e-6)
    assert prediction.recomputed == pytest.approx(1.25)
    assert prediction.middle.mfu == pytest.approx(0.865 / 1.25)
    tokens = v5e.config.data.batch_size * v5e.config.data.sequence_length
    assert prediction.middle.tokens_per_second == pytest.approx(tokens / 2)
    per_chip = prediction.middle.tokens_per_second_per_chip
    assert per_chip == pytest.approx(tokens / 2 / 256)


@pytest.mark.parametrize(
    ("target", "dtype", "rates"),
    [("h100-8", "float8", (989.5e12, 1979e12)), ("v5e-256", "int8", (197e12, 393e12))],
)
def test_eight_bit_products_run_at_their_own_rate(composed, target, dtype, rates):
    key = f"model.compute_dtype={dtype}"
    cluster = machine(composed, target, ["mesh=fsdp", "data.batch_size=256", key])
    cost = execution(3e14, 0)
    flops = replace(cost.flops, eight_bits=2e14)
    plain = cluster.predict(cost)
    faster = cluster.predict(in_one_section(cost, flops))
    achievable = cluster.chip.achievable
    eight_bits = achievable.eight_bits or achievable.products
    seconds = 1 / (rates[0] * achievable.products), 1 / (rates[1] * eight_bits)
    saved_s = 2e14 * (seconds[0] - seconds[1])
    assert plain.products - faster.products == pytest.approx(saved_s)
    assert faster.peak == plain.peak, "MFU refers to the peak of bfloat16"


def test_idle_matrix_units_slow_products_down(v5e):
    cost = execution(PRODUCT_RATE, 0)
    flops = replace(cost.flops, padded=2 * PRODUCT_RATE)
    prediction = v5e.predict(in_one_section(cost, flops))
    assert (prediction.fill, prediction.products) == (0.5, pytest.approx(2))


def test_products_grouped_by_expert_take_longer(composed):
    """They run at a fraction of the rate, or as fast as memory supplies their tiles."""
    slowdowns = {}
    for target in ("v5p-32", "v6e-16", "h100-8"):
        cluster = machine(composed, target, ["mesh=fsdp", "data.batch_size=16"])
        cost = execution(1e15, 0)
        flops = replace(cost.flops, grouped=4e14, grouped_tiles=4e14)
        plain = cluster.predict(cost)
        slower = cluster.predict(in_one_section(cost, flops))
        added_s = slower.products - plain.products
        slowdowns[target] = 1 + added_s / (0.4 * plain.products)
    assert slowdowns["v5p-32"] == pytest.approx(1 / TPU.grouped.rate)
    assert slowdowns["v6e-16"] > slowdowns["v5p-32"] > slowdowns["h100-8"] == 1


def test_only_products_hide_their_memory_traffic(v5e):
    """Products take a second; memory takes three seconds, two of them by products."""
    second = round(MEMORY_RATE)
    prediction = v5e.predict(
        execution(PRODUCT_RATE, 3 * second, product_bytes=2 * second)
    )
    assert prediction.memory == pytest.approx(3)
    assert prediction.bounds.low == pytest.approx(3)
    assert prediction.bounds.high == pytest.approx(2 + 1)
    serial = v5e.predict(execution(PRODUCT_RATE, 3 * second))
    assert serial.bounds.high == pytest.approx(1 + 3)


def test_collectives_without_overlap_may_add_to_products(v5e):
    """Gathers take three seconds, and products take one."""
    collective = total("fsdp", "ICI", 3 * ICI_RATE)
    prediction = v5e.predict(execution(PRODUCT_RATE, 0, collective))
    assert prediction.links[0].seconds == pytest.approx(3)
    assert prediction.bounds.low == pytest.approx(3)
    assert prediction.bounds.high == pytest.approx(4)
    half_hidden = replace(collective, overlapped=0.5)
    prediction = v5e.predict(execution(PRODUCT_RATE, 0, half_hidden))
    assert prediction.bounds.high == pytest.approx(1.5 + 1.5)


def test_layers_wait_for_activations(composed):
    """Products take a second, and tensor parallelism takes half a second."""
    overrides = ("mesh=fsdp_tensor", "mesh.tensor=16", "data.batch_size=256")
    cluster = machine(composed, "v5e-256", overrides)
    collective = total("tensor", "ICI", 0.5 * 0.74 * 100e9)
    prediction = cluster.predict(execution(PRODUCT_RATE, 0, collective))
    assert prediction.bounds.low == pytest.approx(1.5)
    assert prediction.bounds.high == pytest.approx(1.5)


def test_slices_exchange_gradients_at_the_speed_of_the_network(composed):
    """Each chip sends 4 GB over DCN. Programs achieve a third of its 3.125 GB/s."""
    overrides = ("mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2", "data.batch_size=512")
    cluster = machine(composed, "v5e-256x2", overrides)
    collective = total("data", "DCN", 4e9, overlapped=0.25)
    prediction = cluster.predict(execution(PRODUCT_RATE, 0, collective))
    sending_s = 4 / (0.33 * 3.125)
    start_s = TPU.hop_s
    hidden_s = 0.25 * (1 - TPU.unhidden) * sending_s
    (link,) = prediction.links
    assert link.seconds == pytest.approx(sending_s + start_s)
    assert link.hidden == pytest.approx(hidden_s)
    step_s = max(1, hidden_s) + link.exposed
    assert prediction.bounds.low == pytest.approx(slowest_ratio(2, TPU.spread) * step_s)
    assert prediction.bounds.high == pytest.approx(prediction.bounds.low)


def test_kernels_of_a_gpu_run_one_after_another(composed):
    """Products, memory and gathers take a second each."""
    overrides = ("mesh=fsdp", "model.attention=xla", "data.batch_size=16")
    cluster = machine(composed, "h100-8", overrides)
    flops = HOPPER.products * 989.5e12
    collective = total("fsdp", "NVLink", 0.8 * 450e9)
    prediction = cluster.predict(
        execution(flops, round(HOPPER.memory * 3350e9), collective)
    )
    assert [prediction.products, prediction.memory] == pytest.approx([1, 1])
    assert prediction.links[0].seconds == pytest.approx(1 + HOPPER.start_s)
    middle_s = prediction.middle.step_s
    assert middle_s == pytest.approx(3 + HOPPER.start_s)
    width_s = prediction.bounds.high - prediction.bounds.low
    assert width_s == pytest.approx(2 * GPU_SPREAD * middle_s)


def test_resources_of_two_sections_do_not_overlap(v5e):
    """Products in the layers take two seconds, then memory in the loss takes one."""
    layers = execution(2 * PRODUCT_RATE, round(0.5 * MEMORY_RATE))
    loss = execution(0.5 * PRODUCT_RATE, round(MEMORY_RATE))
    prediction = v5e.predict(replace(layers, sections=layers.sections + loss.sections))
    assert (prediction.products, prediction.memory) == pytest.approx((2.5, 1.5))
    assert [section.bound_by for section in prediction.sections] == [PRODUCTS, MEMORY]
    assert prediction.bounds.low == pytest.approx(2 + 1)
    assert prediction.bounds.high == pytest.approx(2.5 + 1.5)


def test_the_update_of_a_compiled_step_is_bound_by_memory(stored_step):
    step = stored_step("ddp_full")
    config = step.program.config
    mesh = step.program.mesh
    prediction = predict(
        step.cost, config.model, config.data, mesh=mesh, chip=CHIPS["v5e"]
    )
    *other_sections, update = prediction.sections
    assert [section.bound_by for section in other_sections] == [PRODUCTS] * 3
    assert (update.name, update.bound_by) == ("embedding and update", MEMORY)


def test_a_rate_that_the_vendor_does_not_state_is_named(composed):
    overrides = ("mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2", "data.batch_size=16")
    cluster = machine(composed, "v4-8x2", overrides)
    with pytest.raises(NotStated, match="dcn_bandwidth"):
        cluster.predict(execution(1e12, 0, total("data", "DCN", 1e6)))


SECONDS = st.floats(0, 100)
FRACTION = st.floats(0, 1)


@given(SECONDS, SECONDS, FRACTION, st.lists(st.tuples(SECONDS, FRACTION, FRACTION)))
def test_the_optimistic_time_is_the_shorter_one(products, memory, part, networks):
    links = [
        Link(("fsdp",), "ICI", 1, 1, s, s * hidden, s * (1 - hidden) * waits)
        for s, hidden, waits in networks
    ]
    busy = BusyTimes(products, memory, memory * part, tuple(links), fill=1.0)
    seconds = time_section("loss", busy).seconds
    assert seconds.low <= seconds.high * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("target", ["h100-8", "a100-8", "b200-8", "v5e-8", "v6e-8"])
def test_the_range_includes_the_times_of_published_steps(composed, target):
    cluster = machine(composed, target, ["mesh=fsdp", "model.attention=xla"])
    prediction = cluster.predict(execution(1e15, 10**9))
    assert cluster.chip.judged
    for ratio in cluster.chip.judged:
        published_s = ratio * prediction.middle.step_s
        assert prediction.step_s.low <= published_s <= prediction.step_s.high
    values = prediction.as_json()
    assert values["step_s"]["high"] == prediction.step_s.high
    assert values["mfu"]["low"] <= prediction.middle.mfu <= values["mfu"]["high"]
    unjudged = replace(prediction, judged=None)
    assert unjudged.step_s == prediction.bounds
