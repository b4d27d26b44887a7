"""The machine, settled before JAX first touches a device."""

import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from etils import epath

from data.machine import cache_folder, usable_cores
from model.attention import across
from model.attention.kernel import choose
from model.axes import AxisRules
from model.choices import (
    Attention,
    ComputeDtype,
    ContextAttention,
    Dtype,
    ExpertExchange,
    Grouped,
)
from model.eight_bits.quantization import Quantization
from model.execution import Execution
from model.experts.grouped import choose_grouped
from train.config import Config, MomentDtype, Platform, RuntimeConfig
from train.errors import ConfigError, Mistake, check_all
from train.hardware.chips import chip_of
from train.mesh import Device
from train.mesh_sizes import num_shards

log = logging.getLogger(__name__)
# What TPUs, and GPUs of NVIDIA (dxg: under Windows) and AMD, are reached by.
_ACCELERATORS = ("accel*", "vfio/*", "nvidia*", "dxg", "kfd")
# glibc's malloc (malloc.h): M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX. All memory comes
# from one heap, and what is freed stays there.
_KEEP_FREED = ((-4, 0), (-1, 2**31 - 1), (-8, 1))


def set_up(config: RuntimeConfig) -> None:
    """Choose platform, virtual CPU devices, determinism and compilation cache.

    Must run before anything asks JAX for a device.
    """
    if config.platform is not Platform.auto:
        jax.config.update("jax_platforms", config.platform.value)
    elif not (_platforms() or _accelerators(Path("/dev"))):
        # Else libtpu, where installed, looks for a TPU for ten seconds, and complains.
        # JAX itself names the platform where it sees a TPU's chips.
        jax.config.update("jax_platforms", "cpu")
    if _platforms() == "cpu":
        keep_freed_memory()
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", config.cpu_devices or cores())
    if config.deterministic and "xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    named = config.compilation_cache or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    cache = epath.Path(named or cache_folder() / "xla").expanduser()
    jax.config.update("jax_compilation_cache_dir", os.fspath(cache))


def keep_freed_memory() -> None:
    """Have memory that is freed used again, rather than asked of Linux once more.

    XLA:CPU allocates a step's intermediate arrays anew at each step. As glibc comes,
    Linux takes so large a block back at once, and hands it out zeroed again, 4 KiB at a
    time: half of a step of a small model (docs/log.md). Does nothing where malloc is
    another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if sys.platform.startswith("linux") and mallopt is not None:
        for name, value in _KEEP_FREED:
            mallopt(name, value)


def _platforms() -> str | None:
    return jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]


def _accelerators(devices: Path) -> bool:
    """Tell whether Linux has a device that is no CPU; where it is not Linux, always."""
    if not sys.platform.startswith("linux"):
        return True
    return any(any(devices.glob(pattern)) for pattern in _ACCELERATORS)


def cores() -> int:
    """Count the cores that may be used, up to two.

    One virtual device a core beats one device with two threads by a quarter on a small
    model; more than two were not measured (docs/log.md).
    """
    return min(2, usable_cores())


def execution(
    config: Config, device: Device, rules: AxisRules, sizes: Mapping[str, int]
) -> Execution:
    """Choose dtypes, attention kernel and the form of collectives for a device.

    On a CPU only the operands of products are rounded to bfloat16, what passes between
    layers stays float32: XLA's CPU is slow at bfloat16 everywhere else.

    Args:
        config: settled.
        device: one of them.
        rules: where arrays lie.
        sizes: of the mesh axes.

    Raises:
        ConfigError: if the platform cannot run the attention kernel or the products
            asked for or hold moments where asked for, or devices cannot share a row as
            asked for.
    """
    model, train = config.model, config.train
    platform, chip = device.platform, chip_of(device.device_kind)
    kernel, quantization, _ = check_all(
        lambda: _kernel(config, device),
        lambda: _quantization(config, device),
        lambda: _check_host_memory(config, platform),
    )
    compute = Dtype.auto if quantization else Dtype(model.compute_dtype)
    if compute is Dtype.auto:
        plain_cpu = platform == "cpu" and not cpu_prefers_bfloat16()
        compute = Dtype.float32 if plain_cpu else Dtype.bfloat16
    grouped, float8 = choose_grouped(platform), None
    if quantization and grouped is not Grouped.megablox:
        float8 = quantization if quantization.dtype is ComputeDtype.float8 else None
    reduce = train.reduce_dtype
    if reduce is Dtype.auto:
        reduce = Dtype.float32 if platform == "cpu" else compute
    return Execution(
        activation_dtype=jnp.dtype("float32" if platform == "cpu" else compute),
        compute_dtype=jnp.dtype(compute),
        quantization=quantization,
        expert_quantization=float8,
        reduce_dtype=jnp.dtype(reduce),
        gather_by_rows=platform == "tpu" and chip is not None and chip.links == 6,
        slices=(("fsdp", config.mesh.dcn.fsdp),) if platform == "tpu" else (),
        platform=platform,
        attention=kernel,
        context_attention=_context_attention(config, kernel, rules, sizes),
        expert_exchange=_expert_exchange(config, platform, rules, sizes),
        grouped=grouped,
        remat=train.remat,
        offload=train.offload,
        rules=rules,
    )


def _context_attention(
    config: Config, kernel: Attention, rules: AxisRules, sizes: Mapping[str, int]
) -> ContextAttention:
    """Choose how devices that share a row attend; no matter which where none do."""
    asked, length = config.mesh.context_attention, config.data.sequence_length
    devices = num_shards(sizes, rules.spec("seq")[0])
    if devices == 1:
        return ContextAttention.ring
    kv_heads = config.model.kv_heads // num_shards(sizes, rules.spec("kv_heads")[0])
    model = config.model
    if rate := model.dropout.attention:
        rule = (
            f"must be 0 where {devices} devices share a row, each with other weights "
        )
        rule += "of its keys; take mesh.context=1, or embedding and residual alone"
        raise ConfigError([Mistake("model.dropout.attention", rate, rule)])
    try:
        return across.choose(asked, kernel, devices, length, kv_heads)
    except ValueError as error:
        rule = f"cannot serve: {error}; change one of them"
        raise ConfigError([Mistake("mesh.context_attention", asked, rule)]) from None


def _expert_exchange(
    config: Config, platform: str, rules: AxisRules, sizes: Mapping[str, int]
) -> ExpertExchange:
    """Choose how tokens reach experts on other devices; no matter where none do.

    Of n tokens of a device, k rows each, among S devices, a gather and a scatter send
    2 n (S - 1) rows; rows there and back are 2 n k (S - 1) / S, and pass through main
    memory once instead of once a chunk. Not on GPUs unless asked for: others saw wrong
    gradients there (marin-community/marin#8077), and nobody has checked ours.
    """
    asked = config.mesh.expert_exchange
    if asked is not ExpertExchange.auto:
        return asked
    devices = num_shards(sizes, dict(rules.params)["experts"])
    ragged = devices >= config.model.experts_per_token and platform == "tpu"
    return ExpertExchange.ragged if ragged else ExpertExchange.all_gather


def _kernel(config: Config, device: Device) -> Attention:
    model, length = config.model, config.data.sequence_length
    chip = chip_of(device.device_kind)
    try:
        kernel = choose(
            model.attention,
            device.platform,
            length,
            model.head_size,
            soft_cap=model.attention_soft_cap is not None,
            sinks=model.attention_sinks,
            dropout=model.dropout.attention > 0,
        )
    except ValueError as error:
        mistake = Mistake("model.attention", model.attention, str(error))
        raise ConfigError([mistake]) from None
    before_hopper = chip is not None and not chip.gains_by("float8")
    if kernel is Attention.cudnn_packed and before_hopper:
        rule = f"needs Hopper or later, not {device.device_kind}; take cudnn"
        raise ConfigError([Mistake("model.attention", kernel.value, rule)])
    return kernel


def _quantization(config: Config, device: Device) -> Quantization | None:
    """Return how linear layers are quantized, None where they are not.

    A CPU emulates, so that what another machine is to run can be tried.
    """
    dtype = config.model.compute_dtype
    if dtype not in (ComputeDtype.float8, ComputeDtype.int8):
        return None
    if device.platform == "cpu":
        return Quantization(dtype, emulated=True)
    chip = chip_of(device.device_kind)
    if chip is None or not chip.gains_by(dtype):
        rule = f"is no faster than bfloat16 on {device.device_kind}; take bfloat16"
        other = {"float8": "int8", "int8": "float8"}[dtype]
        rule += f" or {other}" if chip and chip.gains_by(other) else ""
        raise ConfigError([Mistake("model.compute_dtype", dtype.value, rule)])
    return Quantization(dtype)


def _check_host_memory(config: Config, platform: str) -> None:
    """Refuse what jax 0.10's libtpu (0.0.42) cannot compile; 0.11's (0.0.44) can."""
    optimizer, old = config.optimizer, jax.__version_info__ < (0, 11)
    in_eight = optimizer.moment_dtype is MomentDtype.int8
    if old and platform == "tpu" and optimizer.offload and in_eight:
        rule = f"cannot be in a TPU's host memory with jax {jax.__version__}; install "
        rule += "jax 0.11 or later (Python 3.12), or take bfloat16"
        raise ConfigError([Mistake("optimizer.moment_dtype", "int8", rule)])


# XLA:TPU's: collectives are theirs, and none a part of a product's fusion.
_ON_SPARSE_CORES: dict[str, bool | str] = {
    **{
        f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    },
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
    "xla_sc_enable_instruction_fusion": False,
    **{
        f"xla_tpu_enable_async_collective_fusion_fuse_{kind}": False
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    },
}


def compiler_options(
    device: Device, compute: jnp.dtype, sparse_cores: bool
) -> dict[str, bool | str]:
    """Return XLA's options for the train step, by its compute dtype.

    On a TPU with SparseCores they run the collectives, if they may: left to itself XLA
    runs none of an FSDP step beside its products there (docs/log.md).

    A CPU's default analysis of live ranges copies every optimizer moment at the start
    of each step; the finer one sees that the old moment is read for the last time
    where the new one is written. Of float32 its library YNNPACK is to take products
    alone: left to XLA, what is elementwise around them is faster (docs/log.md).
    """
    if device.platform != "cpu":
        chip = chip_of(device.device_kind)
        return _ON_SPARSE_CORES if sparse_cores and chip and chip.sparse_cores else {}
    options: dict[str, bool | str] = {
        "xla_cpu_copy_insertion_use_region_analysis": True
    }
    if compute == jnp.float32:
        options["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_DOT"
    return options


def cpu_prefers_bfloat16(info: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU multiplies bfloat16 faster than float32.

    It does with AMX, and with AMD's AVX-512 BF16; Intel's alone, where AMX is missing
    or hidden from a virtual machine, has half of float32's rate (docs/log.md).
    """
    try:
        text = info.read_text()
        flags = text.split("flags", 2)[1].split("\n")[0]
    except (OSError, IndexError):
        return False
    return "amx_bf16" in flags or ("avx512_bf16" in flags and "AuthenticAMD" in text)
