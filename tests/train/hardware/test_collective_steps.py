"""Gathers and scatters take the steps that keep a torus' links busy for least time."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from model.gather import AxisSteps, WeightPlacement
from tests.train.machines import machine
from train.config import MeshConfig
from train.hardware.collective_steps import collective_steps
from train.hardware.devices import fake_devices, missing_compiler
from train.hardware.targets import parse_target
from train.plan.compiled.collectives import Collective, list_collectives
from train.plan.compiled.trip_counts import read_module
from train.resolve.mesh import make_mesh

WEIGHT = (4096, 14336)


@pytest.mark.parametrize(
    ("name", "overrides", "gather", "small", "scatter"),
    [
        # The square planes of a torus, then the lines across them.
        ("v5p-128", (), (64, 1), (64, 1), (16, 4, 1)),
        ("v4-256", (), (128, 1), (128, 1), (16, 8, 1)),
        ("v5p-32", (), (16, 1), (16, 1), (4, 4, 1)),
        ("v5p-128x2", ("mesh.dcn.fsdp=2",), (64, 2), (64, 2), (16, 4, 2)),
        ("v5e-256", (), (256, 1), (16, 16, 1), (16, 16, 1)),
        ("v6e-16", (), (16, 1), (4, 4, 1), (4, 4, 1)),
        # Half of a tpu7x's cube has no rings.
        ("tpu7x-64", (), (8, 8, 1), (8, 8, 1), (64, 1)),
    ],
)
def test_steps_follow_the_dims_of_the_torus(
    composed, name, overrides, gather, small, scatter
):
    at = machine(composed, name, ["mesh=fsdp", *overrides])
    assert collective_steps(at.mesh) == (AxisSteps("fsdp", gather, small, scatter),)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        # 4 x 8 x 8: no square plane comes first, and an all-reduce has all links.
        ("v5p-512", ()),
        ("v5p-8", ()),
        ("v5e-8", ()),
        ("tpu7x-128", ()),
        # A part of a slice XLA scatters over in one step.
        ("v5e-256", ("mesh.data=2",)),
        ("v5p-128", ("mesh.data=4",)),
        ("h100-8x4", ()),
    ],
)
def test_one_step_serves_where_two_take_longer(composed, name, overrides):
    at = machine(composed, name, ["mesh=fsdp", *overrides])
    assert collective_steps(at.mesh) == ()


@pytest.fixture(scope="module")
def compile_on():
    """Compile a gather and a scatter of a weight for a machine, and list both."""

    def compile_on(mesh: Mesh, placement: WeightPlacement) -> list[Collective]:
        whole = P()
        cut = P("fsdp")
        found = []
        for function, before, after in (
            (placement.gather, cut, whole),
            (placement.reduce_scatter, whole, cut),
        ):
            mapped = jax.shard_map(
                function, mesh=mesh, in_specs=before, out_specs=after, check_vma=False
            )
            given = jax.ShapeDtypeStruct(
                WEIGHT, jnp.bfloat16, sharding=NamedSharding(mesh, before)
            )
            text = jax.jit(mapped).lower(given).compile().as_text()
            assert text is not None
            found += list_collectives(read_module(text), mesh)
        return found

    return compile_on


@pytest.mark.tpu
@pytest.mark.skipif(
    missing_compiler(parse_target("v5p-8")) is not None, reason="needs libtpu"
)
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        (
            "v5p-128",
            [("all-gather", 6), ("reduce-scatter", 4), ("reduce-scatter", 2)],
        ),
        pytest.param(
            *("v5p-512", [("all-gather", 6), ("all-reduce", 6)]),
            marks=pytest.mark.slow,
        ),
        # XLA writes that its gather on v5e goes along one ring.
        (
            "v5e-256",
            [("all-gather", 2), ("reduce-scatter", 2), ("reduce-scatter", 2)],
        ),
    ],
)
def test_xla_keeps_the_steps_and_links_are_those_that_it_uses(
    planning, compile_on, name, kept
):
    mesh = make_mesh(MeshConfig(fsdp=-1), fake_devices(parse_target(name)))
    placement = WeightPlacement(
        ((0, ("fsdp",)),),
        reduce_dtype=jnp.bfloat16,
        platform="tpu",
        axis_steps=collective_steps(mesh),
    )
    found = compile_on(mesh, placement)
    assert [(c.kind, c.group.links) for c in found] == kept
