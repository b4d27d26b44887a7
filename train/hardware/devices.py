"""Devices of machines that are not present, for ahead-of-time compilation.

XLA's compilers come with libtpu and with JAX's CUDA plugin; neither needs a chip or a
driver. If the compiler is not installed, stand-ins with the same coordinates replace
the devices. Stand-ins suffice to shard arrays, but not to compile.
"""

import importlib.util
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from train.hardware.interconnect import rings
from train.hardware.targets import Target
from train.resolve.mesh import Device

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask a metadata server about this machine
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # safe, because no process drives a chip
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # any value avoids a warning
    "TPU_WORKER_HOSTNAMES": "localhost",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # a driver is not needed
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_LIBTPU_NAMES = {"v5p": "v5"}
_MEGACORE = ("v4", "v5p")  # both cores of a chip are one JAX device

# The fields by which XLA describes a GPU, without those in `train/hardware/chips.py`.
# Source: openxla/xla, xla/backends/gpu/target_config/specs.
_AMPERE = """
  cuda_compute_capability { major: 8 }
  shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912
  core_count: 108 fpus_per_core: 64 l2_cache_size: 41943040 clock_rate_ghz: 1.41
"""
_HOPPER = """
  cuda_compute_capability { major: 9 }
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 l2_cache_size: 52428800 clock_rate_ghz: 1.98
"""
_BLACKWELL = """
  cuda_compute_capability { major: 10 }
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 148 fpus_per_core: 128 l2_cache_size: 132644864 clock_rate_ghz: 1.965
"""
_NEWER_BLACKWELL = """
  cuda_compute_capability {{ major: 10 minor: {minor} }}
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 152 fpus_per_core: 128 l2_cache_size: 135528448 clock_rate_ghz: 2.06
"""
_GPUS = {
    "a100": ("NVIDIA A100-SXM4-80GB", _AMPERE),
    "h100": ("NVIDIA H100 80GB HBM3", _HOPPER),
    "h200": ("NVIDIA H200 141GB HBM3e", _HOPPER),
    "b200": ("NVIDIA B200", _BLACKWELL),
    "b300": ("NVIDIA B300", _NEWER_BLACKWELL.format(minor=3)),
    "gb200": ("NVIDIA GB200", _NEWER_BLACKWELL.format(minor=0)),
    "gb300": ("NVIDIA GB300", _NEWER_BLACKWELL.format(minor=3)),
}


def prepare() -> None:
    """Tell the compilers that no chip is present. Must run before a compiler loads."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # XLA can write programs for absent chips to the cache, but not read them back.
    jax.config.update("jax_enable_compilation_cache", False)


def missing_compiler(target: Target) -> str | None:
    """Return how to install a target's compiler, or None if it is installed."""
    if target.platform == "tpu":
        modules = ["libtpu"]
        extra = "plan"
    else:
        modules = [f"jax_cuda{v}_plugin" for v in (12, 13)]
        extra = "plan-gpu"
    if any(importlib.util.find_spec(module) for module in modules):
        return None
    remedy = f"pip install -e '.[{extra}]' (it needs no accelerator)"
    return f"the compiler for {target.name} is not installed: {remedy}"


def fake_devices(target: Target) -> list[Device]:
    """Return the devices of an absent machine, or stand-ins if the compiler is missing.

    `prepare` must have run, and the platform of this process must be the CPU.
    """
    if missing_compiler(target):
        return list(_stand_ins(target))
    if target.platform == "tpu":
        shape = "x".join(map(str, target.topology))
        bounds = (*target.host_bounds, 1, 1)[:3]
        # Without `wrap` XLA assumes that no dim is a ring, whatever its size.
        wrap = rings((*target.topology, 1, 1)[:3], target.chip)
        topology = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{_LIBTPU_NAMES.get(target.family, target.family)}:{shape}",
            chip_config_name="megacore" if target.family in _MEGACORE else "default",
            chips_per_host_bounds=bounds,
            num_slices=target.slices,
            wrap=wrap,
        )
    else:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=_target_config(target),
            topology=f"{target.slices}x1x{target.num_chips // target.slices}",
        )
    return list(topology.devices)


def _target_config(target: Target) -> str:
    """Return XLA's description of a GPU, as the text of a GpuTargetConfigProto."""
    chip = target.chip
    name, fields = _GPUS[target.family]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {chip.hbm_bandwidth:.0f} device_memory_size: {chip.hbm_bytes}
{fields}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class StandIn:
    """A device with coordinates, for which nothing can be compiled."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int


def _stand_ins(target: Target) -> Iterator[StandIn]:
    kind, _ = _GPUS.get(target.family, (target.chip.kind, ""))
    bounds = (*target.host_bounds, 1, 1)[:3]
    sizes = *reversed((*target.topology, 1, 1)[:3]), target.chip.devices
    on_tpu = target.platform == "tpu"
    hosts: dict[tuple[int, ...], int] = {}
    positions = itertools.product(range(target.slices), *map(range, sizes))
    for device_id, (slice_, z, y, x, core) in enumerate(positions):
        coords = (x, y, z)
        host = (slice_, *(c // b for c, b in zip(coords, bounds, strict=True)))
        yield StandIn(
            id=device_id,
            platform="tpu" if on_tpu else "gpu",
            device_kind=kind,
            process_index=hosts.setdefault(host, len(hosts)),
            slice_index=slice_,
            coords=coords if on_tpu else (slice_, 0, x),
            core_on_chip=core,
        )
