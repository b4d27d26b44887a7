"""Stand-ins are the devices that the compilers know, in all that lays out arrays."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from train.config import DcnConfig, MeshConfig
from train.hardware import devices as topology
from train.hardware.devices import fake_devices, missing_compiler, prepare
from train.hardware.targets import parse_target
from train.resolve.mesh import make_mesh

needs_libtpu = pytest.mark.skipif(
    missing_compiler(parse_target("v5e-8")) is not None, reason="needs libtpu"
)
TPUS = ("v4-8", "v5e-1", "v5e-8", "v5e-16x3", "v5p-64", "v6e-8", "tpu7x-32x2")


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize("name", [*TPUS, "v5p-128", "v4-256x2", "tpu7x-128", "v5e-256"])
def test_a_mesh_of_stand_ins_is_that_of_the_devices(name, planning, monkeypatch):
    target = parse_target(name)
    dcn = DcnConfig(data=target.slices)
    config = MeshConfig(data=target.slices, fsdp=-1, dcn=dcn)

    def described():
        return [
            (
                device.platform,
                device.device_kind,
                device.process_index,
                # Devices of a single slice have no slice_index.
                getattr(device, "slice_index", 0),
                tuple(device.coords),
                device.core_on_chip,
            )
            for device in make_mesh(config, fake_devices(target)).devices.flat
        ]

    devices = described()
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    assert described() == devices


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize("name", ["v5p-128", "v4-128", "v5e-256"])
def test_a_whole_slice_is_compiled_for_with_links_that_go_around(name, planning):
    """Without them XLA gathers on a 3D torus by an all-reduce of the whole."""
    target = parse_target(name)
    mesh = make_mesh(MeshConfig(fsdp=-1), fake_devices(target))
    gathered = jax.shard_map(
        lambda part: jax.lax.all_gather(part, "fsdp", tiled=True),
        mesh=mesh,
        in_specs=PartitionSpec("fsdp"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    place = NamedSharding(mesh, PartitionSpec("fsdp"))
    weight = jax.ShapeDtypeStruct((4096, 14336), jnp.bfloat16, sharding=place)
    text = jax.jit(gathered).lower(weight).compile().as_text()
    assert text is not None
    assert "all-gather" in text
    assert "all-reduce" not in text


@pytest.mark.parametrize("name", [*TPUS, "h100-8x3", "a100-1", "b200-4"])
def test_stand_ins_are_as_many_as_the_machine_has(name, no_compiler):
    target = parse_target(name)
    devices = fake_devices(target)
    assert len({device.id for device in devices}) == target.num_devices
    assert len({device.process_index for device in devices}) == target.num_hosts
    assert len({device.slice_index for device in devices}) == target.slices


def test_a_missing_compiler_is_named_with_what_installs_it(no_compiler):
    assert "[plan]" in (missing_compiler(parse_target("v5e-8")) or "")
    assert "[plan-gpu]" in (missing_compiler(parse_target("h100-8")) or "")


def test_what_the_user_has_set_stays(planning, monkeypatch):
    monkeypatch.setenv("TPU_STDERR_LOG_LEVEL", "0")
    prepare()
    assert topology.os.environ["TPU_STDERR_LOG_LEVEL"] == "0"
