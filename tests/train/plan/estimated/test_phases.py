"""Which networks a collective uses, by hand."""

import pytest

from tests.train.machines import machine
from train.hardware.collective_steps import collective_steps
from train.plan.estimated.collectives import Exchange
from train.plan.estimated.phases import phases

EIGHT = ("mesh=fsdp", "data.batch_size=16")


def exchange(kind, members=(), axis="fsdp"):
    return Exchange((axis,), kind, 1, 800.0, "", "", True, False, 0, members)


def seen(mesh, *sent):
    return {
        (phase.network, phase.exchange.kind, phase.exchange.payload, phase.size)
        for phase in phases(exchange(*sent), mesh)
    }


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        # Four chips a slice: each brings what it has of the other, a quarter of all.
        (
            ("all-gather",),
            {("DCN", "all-gather", 200, 2), ("ICI", "all-gather", 800, 4)},
        ),
        # XLA does not scatter in the slice what it scatters between slices.
        (
            ("reduce-scatter",),
            {("DCN", "reduce-scatter", 200, 2), ("ICI", "all-reduce", 800, 4)},
        ),
        (
            ("all-reduce",),
            {("DCN", "all-reduce", 200, 2), ("ICI", "all-reduce", 800, 4)},
        ),
        (("all-to-all",), {("DCN", "all-to-all", 800, 2)}),
        # Neighbours are in different slices. Two of each; one of each; of one alone.
        (
            ("all-gather", (0, 1, 4, 5)),
            {("DCN", "all-gather", 400, 2), ("ICI", "all-gather", 800, 2)},
        ),
        (("reduce-scatter", (0, 1)), {("DCN", "reduce-scatter", 800, 2)}),
        (("reduce-scatter", (0, 2)), {("ICI", "reduce-scatter", 800, 2)}),
    ],
)
def test_between_slices_a_chip_sends_its_share_of_what_its_slice_has(
    composed, sent, wanted
):
    mesh = machine(composed, "v5e-4x2", *EIGHT, "mesh.dcn.fsdp=2").mesh
    assert seen(mesh, *sent) == wanted


def test_one_network_is_one_phase_and_rings_of_gpus_go_through_all_nodes(composed):
    mesh = machine(composed, "v5e-8", *EIGHT).mesh
    assert seen(mesh, "reduce-scatter") == {("ICI", "reduce-scatter", 800, 8)}
    mesh = machine(composed, "h100-4x2", *EIGHT).mesh
    assert seen(mesh, "all-gather") == {("network", "all-gather", 800, 8)}


def test_a_scatter_over_a_torus_is_timed_in_the_steps_that_it_takes(composed):
    """Of 64 chips as 4 x 4 x 4: planes of 16 by four links, then lines of 4 by two."""
    mesh = machine(composed, "v5p-128", "mesh=fsdp").mesh
    steps = collective_steps(mesh)
    found = phases(exchange("reduce-scatter"), mesh, steps)
    assert [(phase.exchange.payload, phase.size, phase.links) for phase in found] == [
        (800, 16, 4),
        (50, 4, 2),
    ]
    (gather,) = phases(exchange("all-gather"), mesh, steps)
    assert (gather.size, gather.links) == (64, 6)


@pytest.mark.parametrize(("kind", "links"), [("all-gather", 6), ("reduce-scatter", 2)])
def test_a_scatter_of_tpu7x_is_one_ring_as_compiled(composed, kind, links):
    """The slice has rings along three dims."""
    mesh = machine(composed, "tpu7x-128", "mesh=fsdp", "data.batch_size=128").mesh
    (phase,) = phases(exchange(kind), mesh)
    assert phase.links == links
