"""How a step runs on a device: dtypes, kernels, the form of collectives.

What the device cannot do is an error, before anything is compiled.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from model.attention.across import choose_context_attention
from model.attention.kernel import choose_kernel
from model.axes import AxisRules
from model.choices import (
    Attention,
    ComputeDtype,
    ContextAttention,
    Dtype,
    ExpertExchange,
    Grouped,
)
from model.config import ModelConfig
from model.eight_bits.quantization import Quantization
from model.execution import Execution, Numerics
from model.experts.grouped import choose_grouped
from train.config import Config, MomentDtype
from train.errors import ConfigError, Mistake, check_all
from train.hardware.chips import chip_of
from train.mesh import Device
from train.mesh_sizes import num_shards, pipeline_of
from train.runtime import cpu_prefers_bfloat16

_CUDNN_HEAD = 128  # dims of the largest head that cuDNN takes before Hopper


def choose_execution(
    config: Config, device: Device, rules: AxisRules, sizes: Mapping[str, int]
) -> Execution:
    """Choose dtypes, kernels and the form of collectives. The placement is left open.

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
    platform = device.platform
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
    numerics = Numerics(
        activation_dtype=jnp.dtype("float32" if platform == "cpu" else compute),
        compute_dtype=jnp.dtype(compute),
        reduce_dtype=jnp.dtype(reduce),
        quantization=quantization,
        expert_quantization=float8,
    )
    pipeline = pipeline_of(config, sizes["pipeline"])
    return Execution(
        numerics=numerics,
        attention=kernel,
        context_attention=_context_attention(config, kernel, rules, sizes),
        expert_exchange=_expert_exchange(config, platform, rules, sizes),
        grouped=grouped,
        remat=train.remat,
        offload=train.offload,
        pipeline_microbatches=pipeline.microbatches,
        pipeline_repeats=pipeline.repeats,
    )


def _context_attention(
    config: Config, kernel: Attention, rules: AxisRules, sizes: Mapping[str, int]
) -> ContextAttention:
    """Choose how devices that share a row attend; no matter which where none do."""
    asked, length = config.mesh.context_attention, config.data.sequence_length
    devices = num_shards(sizes, rules.spec("seq")[0])
    if devices == 1:
        return ContextAttention.ring
    model = config.model
    of_queries, of_keys = (rules.spec(axis)[0] for axis in ("heads", "kv_heads"))
    kv_heads = model.kv_heads // num_shards(sizes, of_keys)
    if of_queries != of_keys:  # there is a key for each query then
        kv_heads = model.num_heads // num_shards(sizes, of_queries)
    if rate := model.dropout.attention:
        rule = (
            f"must be 0 where {devices} devices share a row, each with other weights "
        )
        rule += "of its keys; take mesh.context=1, or embedding and residual alone"
        raise ConfigError([Mistake("model.dropout.attention", rate, rule)])
    try:
        return choose_context_attention(asked, kernel, devices, length, kv_heads)
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
    try:
        kernel = choose_kernel(
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
    if kernel.is_cudnn and (rule := _unfit_for_cudnn(model, kernel, device)):
        raise ConfigError([Mistake("model.attention", kernel.value, rule)])
    return kernel


def _unfit_for_cudnn(model: ModelConfig, kernel: Attention, device: Device) -> str:
    """Say what NVIDIA's kernel cannot do on this GPU; empty if it serves."""
    name, slower = device.device_kind, "or model.attention=xla (slower)"
    chip, version = chip_of(name), getattr(device, "compute_capability", None)
    hopper = chip is None or chip.gains_by("float8")
    if version is not None:
        hopper = float(version) >= 9
    if model.compute_dtype is ComputeDtype.float32:
        return f"does not multiply float32; take model.compute_dtype=auto {slower}"
    if kernel is Attention.cudnn_packed and not hopper:
        return f"needs Hopper or later, not {name}; take cudnn {slower}"
    if model.head_size > _CUDNN_HEAD and not hopper:
        rule = f"takes heads of up to {_CUDNN_HEAD} dims on {name}, which is before "
        return f"{rule}Hopper, not {model.head_size}; take model.attention=xla (slower)"
    return ""


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
