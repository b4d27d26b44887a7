"""Values that wait in host memory do not change the training."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from etils import epath

from model.params import named
from tests.train.conftest import CUBE, take_steps
from train.config import MESH_AXES, CheckpointConfig
from train.core.layout import moments_of
from train.distributed.replicas import compare_replicas, flip_bit, make_checksums
from train.errors import ConfigError
from train.resolve.execution import ExecutionChoice
from train.run.checkpoint import Checkpoints

LAYERS = ("model.num_layers=2", "train.remat=full")


def check_close(first, second):
    """Check that all values are equal except for rounding, in either memory.

    XLA splits the two updates differently. If a processor adds a product in one
    instruction, a bit of the result may differ.
    """
    for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        np.testing.assert_allclose(
            jax.device_get(a), jax.device_get(b), rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize(
    ("devices", "mesh"), [(1, ()), pytest.param(8, CUBE, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "offload",
    ["train.offload=[residual,attention,mlp_up]", "optimizer.offload=true"],
)
def test_offloading_to_host_memory_changes_no_value(
    programs, store, devices, mesh, offload
):
    plain_program = programs([*LAYERS, *mesh], devices=devices)
    offloading_program = programs([*LAYERS, *mesh, offload], devices=devices)
    expected, actual = (
        take_steps(p, store, p.init(), 2) for p in (plain_program, offloading_program)
    )
    check_close(expected, actual)
    if offload.startswith("optimizer"):
        moments = dict(moments_of(actual[0]))
        assert "optimizer.transform.0.nu.layers.0.0.mlp.up.weight" in moments
        for name, leaf in named(actual[0]):
            kind = "pinned_host" if name in moments else "device"
            assert leaf.sharding.memory_kind == kind


@pytest.mark.parametrize(
    ("platform", "version", "dtype", "refused"),
    [
        ("tpu", (0, 10, 2), "int8", True),
        ("tpu", (0, 11, 0), "int8", False),
        ("tpu", (0, 10, 2), "bfloat16", False),
    ],
)
def test_moments_that_no_compiler_can_offload_are_refused(
    configure, monkeypatch, platform, version, dtype, refused
):
    monkeypatch.setattr(jax, "__version_info__", version)
    moments = "optimizer.offload=true", f"optimizer.moment_dtype={dtype}"
    config = configure([*LAYERS, *moments, "model.attention=xla"])
    device = SimpleNamespace(platform=platform, device_kind="")
    sizes = dict.fromkeys(MESH_AXES, 1)
    if refused:
        with pytest.raises(ConfigError, match=r"jax 0\.11 or later"):
            ExecutionChoice(config, device, sizes).execution()
    else:
        ExecutionChoice(config, device, sizes).execution()


@pytest.mark.slow
def test_a_run_resumes_with_moments_in_either_memory_on_another_mesh(
    programs, store, tmp_path
):
    """The moments move from host memory to that of a device, and back."""
    cube = programs([*LAYERS, *CUBE, "optimizer.offload=true"], devices=8)
    state = cube.init()
    layouts = ((1, "false"), (8, "true"))
    for number, (devices, offload) in enumerate(layouts):
        mesh = () if devices == 1 else ("mesh.fsdp=8",)
        program = programs(
            [*LAYERS, *mesh, f"optimizer.offload={offload}"], devices=devices
        )
        folder = epath.Path(tmp_path / str(number))
        checkpoints = Checkpoints(folder, CheckpointConfig())
        checkpoints.save(0, state, {})
        checkpoints.wait()
        restored_state = checkpoints.saved.restore(program.state)
        checkpoints.close()
        check_close(restored_state, state)
        assert restored_state is not None
        assert jax.tree.map(lambda x: x.sharding, restored_state) == program.shardings
        state = restored_state


@pytest.mark.slow
def test_a_flipped_bit_in_host_memory_is_found(programs):
    names = "mesh.data=2", "optimizer.offload=true"
    program = programs([*LAYERS, *names], devices=2)
    state = program.init()
    checksums = make_checksums(program.state, program.mesh)
    assert checksums is not None
    name, _ = moments_of(state)[-1]
    assert compare_replicas(checksums(state), program.state, program.mesh) == []
    findings = compare_replicas(
        checksums(flip_bit(state, name, 1)), program.state, program.mesh
    )
    assert {finding.array for finding in findings} == {name}
