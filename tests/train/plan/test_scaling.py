"""More slices, from the program for two."""

import pytest

from tests.train.machines import execution, machine, total
from train.hardware.achievable import TPU, slowest
from train.plan.scaling import num_slices, print_weak_scaling, weak_scaling

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
        kept = 0.1 / (0.1 + exposed) / slowest(row.slices, TPU.spread)
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
