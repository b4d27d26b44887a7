"""The setup of the runtime chooses a platform, and asks no other platform."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tests.program import program_code
from train.config import RuntimeConfig
from train.hardware.chips import CHIPS
from train.runtime import (
    DOUBLE_BUFFERING,
    compiler_options,
    cpu_prefers_bfloat16,
    set_up,
)

DEVICES = program_code("""
from train.config import RuntimeConfig
from train.runtime import set_up
set_up(RuntimeConfig(compilation_cache='~/xla'))
import jax
print(jax.devices()[0].platform)
print(jax.config.jax_compilation_cache_dir)
""")

REMOTE_CACHE = program_code("""
from train.config import RuntimeConfig
from train.runtime import set_up
set_up(RuntimeConfig(compilation_cache='gs://bucket/xla'))
import jax
print(jax.config.jax_compilation_cache_dir)
""")

FAULTS = program_code("""
import resource
from train.config import Platform, RuntimeConfig
from train.runtime import set_up
set_up(RuntimeConfig(platform=Platform.cpu, cpu_devices=1))
import jax, jax.numpy as jnp

def large(x):  # 64 MiB between two products
    return jnp.sum(jnp.sin(jnp.outer(x, x)) @ x)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

step, x = jax.jit(large), jnp.ones(4096)
for _ in range(40):  # the heap finds its size
    step(x).block_until_ready()
before = faults()
for _ in range(20):
    step(x).block_until_ready()
print(faults() - before)
""")


def test_the_cache_of_compiled_programs_may_be_in_a_bucket():
    """A local folder is tried below, in the process that finds no TPU."""
    process = subprocess.run(
        [sys.executable, "-c", REMOTE_CACHE], capture_output=True, text=True, check=True
    )
    assert process.stdout == "gs://bucket/xla\n"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_a_step_reuses_the_memory_of_the_last_one():
    process = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    pages = 4 * 4096**2 // 4096  # A step touches this many.
    assert int(process.stdout) < 20 * pages / 4


@pytest.mark.parametrize(
    ("vendor", "flags", "prefers"),
    [
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16", False),
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("AuthenticAMD", "avx2", False),
    ],
)
def test_a_cpu_multiplies_in_its_faster_dtype(tmp_path, vendor, flags, prefers):
    info = tmp_path / "cpuinfo"
    info.write_text(f"vendor_id\t: {vendor}\nflags\t\t: fpu {flags}\nvmx flags\t: x\n")
    assert cpu_prefers_bfloat16(info) == prefers
    assert not cpu_prefers_bfloat16(tmp_path / "missing")


@pytest.mark.parametrize(
    ("chip", "asked", "there"),
    [("v6e", True, True), ("v6e", False, False), ("v5e", True, False)],
)
def test_collectives_run_on_sparse_cores_if_that_hides_them(chip, asked, there):
    device = SimpleNamespace(platform="tpu", device_kind=CHIPS[chip].kind)
    config = RuntimeConfig(sparse_cores=asked)
    options = compiler_options(
        device, jnp.bfloat16, config, num_devices=8, profiled=False
    )
    assert any("sparse_core" in name for name in options) is there


@pytest.mark.parametrize("profiled", [True, False])
def test_only_a_profiled_gpu_launches_kernels_separately(profiled):
    """XLA's trace does not name the kernels of a command buffer."""
    device = SimpleNamespace(platform="gpu", device_kind=CHIPS["h100"].kind)
    options = compiler_options(
        device, jnp.bfloat16, RuntimeConfig(), num_devices=1, profiled=profiled
    )
    assert options == ({"xla_gpu_enable_command_buffer": ""} if profiled else {})


def test_several_gpus_overlap_collectives_unless_a_key_or_a_flag_says_otherwise(
    monkeypatch,
):
    device = SimpleNamespace(platform="gpu", device_kind=CHIPS["h100"].kind)

    def options(tuning: bool) -> dict[str, bool | str]:
        config = RuntimeConfig(gpu_tuning=tuning)
        return compiler_options(
            device, jnp.bfloat16, config, num_devices=8, profiled=False
        )

    monkeypatch.setenv("XLA_FLAGS", "")
    assert options(True) == {DOUBLE_BUFFERING: True}
    assert options(False) == {}
    monkeypatch.setenv("XLA_FLAGS", f"--{DOUBLE_BUFFERING}=false")
    assert options(True) == {}


@pytest.mark.parametrize(
    ("variables", "tuning", "fraction"),
    [
        ({}, True, "0.9"),
        ({}, False, None),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, True, "0.5"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, True, None),
    ],
)
def test_a_gpus_memory_is_reserved_unless_a_variable_says_how_much(
    monkeypatch, variables, tuning, fraction
):
    monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "cpu", **variables})
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    set_up(RuntimeConfig(gpu_tuning=tuning))
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == fraction


def test_without_a_tpu_its_library_stays_silent(tmp_path):
    """The test matters if libtpu is installed. The cache's ~ is expanded."""
    variables = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {k: v for k, v in os.environ.items() if k not in variables}
    environment["HOME"] = str(tmp_path)
    process = subprocess.run(
        [sys.executable, "-c", DEVICES], env=environment, capture_output=True, text=True
    )
    device, cache = process.stdout.split()
    assert cache == f"{tmp_path}/xla"
    files = ("nvidia*", "accel*", "vfio/[0-9]*", "kfd", "dxg")
    if not any(any(Path("/dev").glob(name)) for name in files):
        assert (device, process.stderr) == ("cpu", "")
