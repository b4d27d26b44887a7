"""The speed on more slices is predicted from the program for two."""

import pytest

from tests.train.machines import execution, machine, total
from train.hardware.achievable import HOPPER, TPU, slowest_ratio
from train.plan.scaling import print_weak_scaling

TWO_SLICES = ("mesh=fsdp", "mesh.data=2", "mesh.dcn.data=2", "data.batch_size=512")


def test_traffic_grows_like_a_ring_and_speed_falls(composed, capsys):
    """The step has 0.1 s of products, and 0.1 GB a chip over DCN that nothing hides."""
    flops = 0.1 * 0.865 * 197e12
    collective = total("data", "DCN", 1e8)
    step = execution(flops, 0, total("fsdp", "ICI", 1e9, 1.0), collective)
    cluster = machine(composed, "v5e-256x2", [*TWO_SLICES, "data.sequence_length=1024"])
    points = cluster.weak_scaling(step)
    rows = {point.slices: point for point in points}
    for slices, expected in {1: 0, 2: 1e8, 4: 1.5e8, 199: 2e8 * 198 / 199}.items():
        assert rows[slices].sent == pytest.approx(expected)
    assert rows[199].prediction.chips == 50_944
    assert rows[199].prediction.tokens == 199 * 256 * 1024
    assert (rows[1].efficiency.low, rows[1].efficiency.high) == (1, 1)
    for row in points[1:]:
        exposed_s = row.sent / (0.33 * 3.125e9) + TPU.hop_s * (row.slices - 1)
        efficiency = 0.1 / (0.1 + exposed_s) / slowest_ratio(row.slices, TPU.spread)
        assert row.efficiency.low == pytest.approx(efficiency)
    efficiency = [row.efficiency.low for row in points]
    assert efficiency == sorted(efficiency, reverse=True)
    print_weak_scaling(points)
    assert "50,944" in capsys.readouterr().out


@pytest.mark.parametrize("preset", ["fsdp", "ddp"])
def test_a_ring_of_gpus_goes_through_all_of_each_node(composed, preset):
    """Each GPU sends a gather except for its part: within one node, 7/8 over NVLink."""
    cluster = machine(composed, "h100-8x2", [f"mesh={preset}", "data.batch_size=16"])
    axis = {"fsdp": "fsdp", "ddp": "data"}[preset]
    step = execution(1e12, 0, total(axis, "network", 15 / 16 * 1e9))
    rows = {row.slices: row for row in cluster.weak_scaling(step)}
    (link,) = rows[1].prediction.links
    assert (link.network, rows[1].sent) == ("NVLink", 0)
    assert link.sent == pytest.approx(7 / 8 * 1e9)
    assert link.seconds == pytest.approx(
        link.sent / (HOPPER.links * 450e9) + HOPPER.start_s
    )
    for nodes in (2, 4, 199):
        members = 8 * nodes
        assert rows[nodes].sent == pytest.approx((members - 1) / members * 1e9)
