"""More slices, from the program for two."""

from dataclasses import replace

import pytest

from tests.train.machines import execution, machine, total
from train.hardware.achievable import HOPPER, TPU, slowest_ratio
from train.hardware.interconnect import num_slices
from train.plan.scaling import print_weak_scaling, weak_scaling

ACROSS = ("mesh.data=2", "mesh.dcn.data=2")


@pytest.fixture(scope="module")
def two(composed):
    rows = ("data.batch_size=512", "data.sequence_length=1024")
    return machine(composed, "v5e-256x2", "mesh=fsdp", *ACROSS, *rows)


def scaled(two, overlapped):
    """0.1 s of products and 0.1 GB a chip over DCN."""
    flops, sent = 0.1 * 0.865 * 197e12, total("data", "DCN", 1e8, overlapped)
    step = execution(flops, 0, total("fsdp", "ICI", 1e9, 1.0), sent)
    return weak_scaling(step, *two.place)


def test_what_a_chip_sends_grows_like_a_ring(two):
    rows = {row.slices: row for row in scaled(two, 0.0)}
    assert rows[1].sent == 0
    assert rows[2].sent == pytest.approx(1e8)
    assert rows[4].sent == pytest.approx(1.5e8)
    assert rows[199].sent == pytest.approx(2e8 * 198 / 199)
    assert rows[199].prediction.chips == 50_944
    assert rows[199].prediction.tokens == 199 * 256 * 1024


def test_the_speed_kept_falls_with_what_nothing_hides(two, capsys):
    rows = scaled(two, 0.0)
    assert (rows[0].efficiency.low, rows[0].efficiency.high) == (1, 1)
    for row in rows[1:]:
        exposed = row.sent / (0.33 * 3.125e9) + TPU.hop_s * (row.slices - 1)
        kept = 0.1 / (0.1 + exposed) / slowest_ratio(row.slices, TPU.spread)
        assert row.efficiency.low == pytest.approx(kept)
    kept = [row.efficiency.low for row in rows]
    assert kept == sorted(kept, reverse=True)
    print_weak_scaling(rows)
    assert "50,944" in capsys.readouterr().out


def test_it_starts_from_several_slices(composed):
    one = machine(composed, "v5e-256", "mesh=fsdp")
    assert num_slices(one.mesh.devices.flat) == 1
    assert weak_scaling(execution(1, 1), *one.place) == []
    nodes = machine(composed, "h100-8x4", "mesh=fsdp")
    assert num_slices(nodes.mesh.devices.flat) == 4


@pytest.mark.parametrize("preset", ["fsdp", "ddp"])
def test_a_ring_of_gpus_goes_through_all_of_each_node(composed, preset):
    """Of a gather each sends all but its own part; in one node, 7/8 over NVLink."""
    two = machine(composed, "h100-8x2", f"mesh={preset}", "data.batch_size=16")
    axis = {"fsdp": "fsdp", "ddp": "data"}[preset]
    step = execution(1e12, 0, total(axis, "network", 15 / 16 * 1e9))
    rows = {row.slices: row for row in weak_scaling(step, *two.place)}
    (inside,) = rows[1].prediction.links
    assert (inside.network, rows[1].sent) == ("NVLink", 0)
    assert inside.sent == pytest.approx(7 / 8 * 1e9)
    assert inside.seconds == pytest.approx(
        inside.sent / (HOPPER.links * 450e9) + HOPPER.start_s
    )
    for nodes in (2, 4, 199):
        members = 8 * nodes
        assert rows[nodes].sent == pytest.approx((members - 1) / members * 1e9)


def test_a_permute_sends_what_it_holds_to_however_many(composed):
    across = ("mesh=fsdp", "mesh.context=2", "mesh.dcn.context=2", "mesh.fsdp=8")
    two = machine(composed, "h100-8x2", *across, "data.batch_size=16")
    permute = replace(total("context", "network", 1e6), kind="collective-permute")
    rows = weak_scaling(execution(1e12, 0, permute), *two.place)
    assert [row.sent for row in rows] == [0] + [1e6] * (len(rows) - 1)
    assert rows[0].prediction.links[0].seconds == 0


def test_more_slices_would_be_stages_without_layers(composed):
    stages = ("mesh=fsdp", "mesh.pipeline=2", "mesh.dcn.pipeline=2", "mesh.fsdp=8")
    two = machine(composed, "h100-8x2", *stages, "data.batch_size=16")
    sent = total("pipeline", "network", 1e6)
    assert weak_scaling(execution(1e12, 0, sent), *two.place) == []


@pytest.mark.parametrize(
    ("name", "network", "words", "others"),
    [
        ("v5e-8x2", "DCN", ("slices", "DCN a chip", "v5e"), ("nodes", "network a")),
        ("h100-8x2", "network", ("nodes", "network a chip"), ("slices", "DCN", "v5e")),
    ],
)
def test_parts_are_called_what_they_are(composed, capsys, name, network, words, others):
    two = machine(composed, name, "mesh=fsdp", *ACROSS, "data.batch_size=512")
    step = execution(1e12, 0, total("data", network, 1e6))
    print_weak_scaling(weak_scaling(step, *two.place))
    printed = capsys.readouterr().out
    assert [word for word in words if word not in printed] == []
    assert [word for word in others if word in printed] == []
    assert "0.00" not in printed  # short steps in milliseconds
