"""Set up JAX for this machine. This must precede the first use of a device."""

import ctypes
import logging
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from etils import epath

from data.machine import cache_folder, usable_cores
from model.compat import make_cudnn_deterministic
from train.config import Platform, RuntimeConfig
from train.hardware.chips import chip_of
from train.resolve.mesh import Device

log = logging.getLogger(__name__)
# Device files of TPUs, and of GPUs of NVIDIA (dxg: under Windows) and AMD.
_ACCELERATORS = ("accel*", "vfio/*", "nvidia*", "dxg", "kfd")
# The fraction of a GPU's memory that JAX reserves. The rest remains for NCCL and CUDA.
GPU_MEMORY_FRACTION = "0.9"
# jaxlib refuses to start if both variables are set.
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# XLA:GPU unrolls the loop over layers once, and gathers the weights of a layer while it
# computes another. Other options of XLA hide fewer bytes (docs/log/gpu.md).
DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_double_buffering"
# Options of glibc's malloc (malloc.h): M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX. With
# these values all memory comes from one heap, and freed memory stays there.
_KEEP_FREED = ((-4, 0), (-1, 2**31 - 1), (-8, 1))


def set_up(config: RuntimeConfig) -> None:
    """Choose platform, virtual CPU devices, determinism and compilation cache.

    Must run before anything asks JAX for a device.
    """
    if config.platform is not Platform.auto:
        jax.config.update("jax_platforms", config.platform.value)
    elif not (_platforms() or _may_have_accelerator(Path("/dev"))):
        # Otherwise an installed libtpu looks for a TPU for ten seconds.
        # If JAX finds the chips of a TPU, it has already set the platform.
        jax.config.update("jax_platforms", "cpu")
    if _platforms() == "cpu":
        keep_freed_memory()
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        num_devices = config.cpu_devices or default_cpu_devices()
        jax.config.update("jax_num_cpu_devices", num_devices)
    if config.deterministic and "xla_gpu_deterministic_ops" not in flags:
        flags = f"{flags} --xla_gpu_deterministic_ops=true".strip()
        os.environ["XLA_FLAGS"] = flags
    if "xla_gpu_deterministic_ops=true" in flags:
        make_cudnn_deterministic()
    if config.gpu_tuning and not any(map(os.environ.get, FRACTION_VARIABLES)):
        os.environ[FRACTION_VARIABLES[0]] = GPU_MEMORY_FRACTION
    cache_dir = config.compilation_cache or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    cache = epath.Path(cache_dir or cache_folder() / "xla").expanduser()
    jax.config.update("jax_compilation_cache_dir", os.fspath(cache))


def keep_freed_memory() -> None:
    """Let malloc reuse freed memory, instead of returning it to Linux.

    XLA:CPU frees the intermediate arrays after each step and allocates them in the
    next. By default glibc returns such large blocks to Linux, which zeroes their pages
    before the next use. The zeroing takes half of a small model's step (docs/log).
    Nothing happens if malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if sys.platform.startswith("linux") and mallopt is not None:
        for option, value in _KEEP_FREED:
            mallopt(option, value)


def _platforms() -> str | None:
    return jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]


def _may_have_accelerator(devices: Path) -> bool:
    """Return whether there may be an accelerator: True on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return True
    return any(any(devices.glob(pattern)) for pattern in _ACCELERATORS)


def default_cpu_devices() -> int:
    """Return the default number of virtual devices: the usable cores, at most two.

    Two virtual devices train a small model faster than one device with two threads
    (docs/log/cpu.md). More than two were not measured.
    """
    return min(2, usable_cores())


# Options with which XLA:TPU runs collectives on SparseCores, not fused with products.
_ON_SPARSE_CORES: dict[str, bool | str] = {
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
    "xla_sc_enable_instruction_fusion": False,
}
for _kind in ("all_gather", "reduce_scatter", "all_reduce"):
    _ON_SPARSE_CORES |= {
        f"xla_tpu_enable_sparse_core_collective_offload_{_kind}": True,
        f"xla_tpu_enable_async_collective_fusion_fuse_{_kind}": False,
    }


def compiler_options(
    device: Device,
    compute_dtype: jnp.dtype,
    config: RuntimeConfig,
    *,
    num_devices: int,
    profiled: bool,
) -> dict[str, bool | str]:
    """Return the XLA options for the training step with a compute dtype.

    With `config.gpu_tuning`, several GPUs overlap more collectives with products,
    unless the variable XLA_FLAGS has this option.

    With `config.sparse_cores`, collectives run on a TPU's SparseCores, if it has any.
    Without these options, XLA overlaps no collective of an FSDP step with products
    (docs/log).

    With `profiled`, a GPU launches each kernel separately. Otherwise it launches many
    at once (command buffers), and the trace does not name these kernels.

    On a CPU, XLA's default analysis of live ranges copies every optimizer moment at the
    start of each step. Region analysis sees that an old moment is last read when the
    new one is written, and copies none. In float32 the library YNNPACK runs only
    products, because XLA's elementwise operations are faster (docs/log).
    """
    options: dict[str, bool | str] = {}
    if device.platform == "gpu":
        if profiled:
            options["xla_gpu_enable_command_buffer"] = ""
        flags = os.environ.get("XLA_FLAGS", "")
        if config.gpu_tuning and num_devices > 1 and DOUBLE_BUFFERING not in flags:
            options[DOUBLE_BUFFERING] = True
        return options
    if device.platform != "cpu":
        chip = chip_of(device.device_kind)
        has_sparse_cores = chip is not None and chip.sparse_cores
        return _ON_SPARSE_CORES if config.sparse_cores and has_sparse_cores else {}
    options["xla_cpu_copy_insertion_use_region_analysis"] = True
    if compute_dtype == jnp.float32:
        options["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_DOT"
    return options


def cpu_prefers_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU multiplies bfloat16 faster than float32.

    Intel's CPUs do so with AMX, and AMD's with AVX-512 BF16. On Intel, AVX-512 BF16
    alone has half of float32's rate, and a virtual machine may hide AMX (docs/log).
    """
    try:
        text = cpu_info.read_text()
        flags = text.split("flags", 2)[1].split("\n")[0]
    except (OSError, IndexError):
        return False
    return "amx_bf16" in flags or ("avx512_bf16" in flags and "AuthenticAMD" in text)
