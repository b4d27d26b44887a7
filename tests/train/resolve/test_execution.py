"""An execution that a device cannot do is refused with a remedy."""

from types import SimpleNamespace

import pytest

from train.config import MESH_AXES
from train.errors import ConfigError
from train.resolve.execution import ExecutionChoice

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("name", "version", "typed", "rule"),
    [
        (H100, "9.0", ["model.head_dim=256"], ""),
        ("NVIDIA A100-SXM4-80GB", "8.0", [], ""),
        ("NVIDIA A100-SXM4-80GB", None, ["model.head_dim=256"], "at most 128 dims"),
        ("NVIDIA L4", "8.9", ["model.head_dim=256"], "not 256; set model.attention=x"),
        ("NVIDIA L4", "8.9", ["model.attention=cudnn_packed"], "needs Hopper or later"),
        (H100, "9.0", ["model.compute_dtype=float32"], "=auto or"),
    ],
)
def test_what_cudnn_cannot_do_on_a_gpu_is_refused(
    configure, name, version, typed, rule
):
    properties = {"platform": "gpu", "device_kind": name, "compute_capability": version}
    typed = "model.attention=cudnn", "model.compute_dtype=auto", *typed
    config = configure(typed)
    device = SimpleNamespace(**properties)
    sizes = dict.fromkeys(MESH_AXES, 1)
    if not rule:
        execution = ExecutionChoice(config, device, sizes).execution()
        assert execution.attention.kernel == "cudnn"
        return
    with pytest.raises(ConfigError, match=rule):
        ExecutionChoice(config, device, sizes).execution()


@pytest.mark.parametrize(
    ("platform", "overrides", "has_kernel"),
    [
        ("gpu", [], True),
        ("gpu", ["runtime.gpu_tuning=false"], False),
        ("gpu", ["model.embed_dim=12288", "model.head_dim=64"], False),
        ("cpu", [], False),
    ],
)
def test_a_tuned_gpu_has_a_kernel_of_norms(configure, platform, overrides, has_kernel):
    device = SimpleNamespace(platform=platform, device_kind=H100)
    config = configure(["model.compute_dtype=auto", *overrides])
    choice = ExecutionChoice(config, device, dict.fromkeys(MESH_AXES, 1))
    assert (choice.execution().normalize is not None) is has_kernel


@pytest.mark.parametrize(
    ("platform", "layers", "axis", "typed", "unroll"),
    [
        ("gpu", 16, "data", "null", -1),
        ("gpu", 17, "data", "null", 1),
        ("gpu", 16, "fsdp", "null", 1),
        ("gpu", 16, "pipeline", "null", 1),
        ("gpu", 16, "data", "null train.remat=full", 1),
        ("gpu", 16, "data", "2", 2),
        ("cpu", 2, "data", "null", 1),
        ("cpu", 2, "data", "-1", -1),
    ],
)
def test_only_a_gpu_unrolls_few_layers_by_default(
    configure, platform, layers, axis, typed, unroll
):
    typed = f"model.layer_unroll={typed}".split()
    typed += [f"model.num_layers={layers}", "model.compute_dtype=auto"]
    config = configure(typed)
    device = SimpleNamespace(platform=platform, device_kind=H100)
    sizes = {**dict.fromkeys(MESH_AXES, 1), axis: 2}
    assert ExecutionChoice(config, device, sizes).execution().layer_unroll == unroll


def test_pieces_of_rows_that_are_shorter_than_a_convolution_are_refused(programs):
    overrides = "mesh.context=4", "mesh.data=2", "data.sequence_length=32"
    with pytest.raises(ConfigError, match="must be at least 40"):
        programs(
            [*overrides, "model.mixer=gated_delta", "model.delta_conv_width=6"],
            devices=8,
        )


@pytest.mark.parametrize(
    "typed",
    [
        [],
        ["model.compute_dtype=float8"],
        ["model.compute_dtype=int8"],
        ["mesh.context=2", "data.sequence_length=64"],
        ["mesh.pipeline=2", "model.num_layers=4"],
    ],
    ids=" ".join,
)
def test_executions_of_equal_configs_are_equal_and_hash_equally(configure, typed):
    """The planner keys its cache of traces by them."""
    config = configure(typed)
    sizes = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
    device = SimpleNamespace(platform="cpu", device_kind="cpu")
    first = ExecutionChoice(config, device, sizes).execution()
    second = ExecutionChoice(configure(typed), device, sizes).execution()
    assert first == second
    assert hash(first) == hash(second)


def test_executions_that_differ_only_in_eight_bits_are_not_equal(configure):
    sizes = dict.fromkeys(MESH_AXES, 1)
    device = SimpleNamespace(platform="cpu", device_kind="cpu")
    dtypes = ("float8", "int8", "bfloat16")
    configs = [configure([f"model.compute_dtype={dtype}"]) for dtype in dtypes]
    executions = {
        ExecutionChoice(config, device, sizes).execution() for config in configs
    }
    assert len(executions) == len(dtypes)
