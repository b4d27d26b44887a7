"""Devices become a mesh."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from train.config import MESH_AXES, DcnConfig, MeshConfig
from train.errors import ConfigError
from train.hardware import devices as topology
from train.hardware.devices import fake_devices
from train.hardware.targets import parse_target
from train.resolve import mesh
from train.resolve.mesh import make_mesh


@pytest.mark.parametrize(
    "config", [MeshConfig(fsdp=4), MeshConfig(data=-1, tensor=3), MeshConfig(fsdp=16)]
)
def test_a_wrong_product_names_the_remedy(config):
    with pytest.raises(ConfigError) as error:
        make_mesh(config)
    (mistake,) = error.value.mistakes
    assert mistake.key == "mesh"
    assert f"fsdp {config.fsdp}" in str(mistake.value)
    for part in ("the 8 devices", "one axis to -1", "runtime.cpu_devices"):
        assert part in mistake.rule


@pytest.mark.parametrize(
    ("config", "crossing"),
    [
        (MeshConfig(data=-1, fsdp=4, dcn=DcnConfig(data=2)), "data"),
        (MeshConfig(fsdp=4, tensor=2, dcn=DcnConfig(fsdp=2)), "fsdp"),
    ],
)
def test_only_the_outer_part_of_a_dcn_axis_crosses_granules(config, crossing):
    """Eight devices stand for two granules of four."""
    grid = make_mesh(config).devices
    granule = np.vectorize(jax.devices().index)(grid) // 4
    sizes = dict(zip(MESH_AXES, grid.shape, strict=True))
    index = np.indices(grid.shape)[MESH_AXES.index(crossing)]
    assert (granule == index // (sizes[crossing] // 2)).all()


def test_processes_are_granules_if_there_are_no_slices(monkeypatch):
    monkeypatch.setattr(mesh, "Mesh", lambda grid, axes, axis_types: grid)
    devices = [
        SimpleNamespace(id=i, process_index=i // 2, platform="cpu", device_kind="cpu")
        for i in range(8)
    ]
    grid = make_mesh(MeshConfig(data=4, fsdp=2, dcn=DcnConfig(data=4)), devices)
    assert [[d.process_index for d in row] for row in grid.reshape(4, 2)] == [
        [i, i] for i in range(4)
    ]
    with pytest.raises(ConfigError, match=r"mesh\.dcn") as error:
        make_mesh(MeshConfig(data=2, fsdp=4, dcn=DcnConfig(data=2)), devices)
    assert "the number of slices (or hosts), 4" in str(error.value)


def test_a_dcn_factor_must_divide_its_axis():
    with pytest.raises(ConfigError) as error:
        make_mesh(MeshConfig(data=8, dcn=DcnConfig(fsdp=2)))
    (mistake,) = error.value.mistakes
    assert mistake[:3] == ("mesh.dcn.fsdp", 2, "must divide mesh.fsdp=1")


@pytest.fixture
def machine(monkeypatch):
    """Return a function from a machine's name to stand-ins for its devices."""
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    return lambda name: fake_devices(parse_target(name))


@pytest.mark.parametrize(
    ("name", "tensor"), [("v5e-256", 16), ("v5e-256", 8), ("v5p-384", 6), ("v5e-8", 2)]
)
def test_axes_fit_a_torus_even_if_they_are_not_whole_dims(machine, name, tensor):
    devices = machine(name)
    grid = make_mesh(MeshConfig(fsdp=-1, tensor=tensor), devices).devices
    assert grid.shape == (1, 1, len(devices) // tensor, 1, 1, tensor)
    assert set(grid.flat) == set(devices)


@pytest.mark.parametrize("config", [MeshConfig(fsdp=-1), MeshConfig(tensor=-1)])
def test_a_mesh_over_several_tpu_slices_must_set_dcn(machine, config):
    with pytest.raises(ConfigError) as error:
        make_mesh(config, machine("v5e-8x2"))
    (mistake,) = error.value.mistakes
    assert mistake.key == "mesh.dcn"
    assert "mesh.dcn.data=2" in mistake.rule


def test_neighbours_along_fsdp_are_in_different_slices(machine):
    config = MeshConfig(fsdp=-1, tensor=2, dcn=DcnConfig(fsdp=2))
    grid = make_mesh(config, machine("v5e-8x2")).devices
    assert [device.slice_index for device in grid.flat] == [0, 0, 1, 1] * 4
