"""Choose how a program runs on its devices: dtypes, kernels and placement.

A choice that the devices cannot run raises ConfigError before anything is compiled.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from data.errors import Mistake
from model.axes import AxisRules
from model.catalog import EXECUTION_PARTS
from model.choices import (
    Attention,
    ComputeDtype,
    ContextAttention,
    Dtype,
    ExpertExchange,
    Grouped,
)
from model.config import ModelConfig
from model.execution import Execution, Numerics
from model.execution_parts import ExecutionParts
from model.gather import AxisSteps
from model.mixer_catalog import kinds_of
from model.placement import Placement
from model.products import Quantization
from train.config import Config, MomentDtype, Remat
from train.core.layout import batch_shards
from train.core.shards import num_shards
from train.errors import ConfigError, check_all
from train.hardware.chips import chip_of
from train.resolve.mesh import Device
from train.resolve.mesh_sizes import pipeline_of
from train.resolve.sharding import axis_rules
from train.runtime import cpu_prefers_bfloat16

_MOST_UNROLLED = 16  # The largest number of layers that a GPU runs without a loop.
_CUDNN_HEAD_DIM = 128  # The largest head dim of cuDNN's kernel on GPUs before Hopper.


def scatters_tables(placement: Placement) -> bool:
    """Return `Placement.scatters_tables` for the placement's mesh and rules."""
    if placement.mesh is None or placement.automatic_axes:
        return False
    table_axes = dict(placement.sharded_dims(("vocab", "embed")))
    if {*table_axes} != {1}:
        return False
    # With fewer shards, a shard of the float32 gradient takes much memory.
    return math.prod(placement.mesh.shape[axis] for axis in table_axes[1]) >= 8


@dataclass(frozen=True)
class ExecutionChoice:
    """Chooses the execution of a config on devices of one kind.

    device: one of the devices.
    sizes: the sizes of the mesh axes.
    parts: the kernels and methods to choose from.
    """

    config: Config
    device: Device
    sizes: Mapping[str, int]
    parts: ExecutionParts = EXECUTION_PARTS

    @cached_property
    def rules(self) -> AxisRules:
        """The rule tables of the config."""
        return axis_rules(self.config.mesh)

    def execution(self) -> Execution:
        """Return the execution, with dtypes and kernels but without its placement.

        On a CPU, only the operands of products are rounded to bfloat16, and activations
        between layers stay float32: XLA's CPU backend is slow at other operations in
        bfloat16.

        Raises:
            ConfigError: if the platform cannot run the attention kernel or the
                products, or cannot put the moments in the configured memory, or if
                devices cannot share rows, or exchange the rows of experts, by the
                configured method.
        """
        config = self.config
        train = config.train
        platform = self.device.platform
        kernel, quantization, _ = check_all(
            self._kernel, self._quantization, self._check_host_memory
        )
        compute_dtype = Dtype.auto
        if quantization is None:
            compute_dtype = Dtype(config.model.compute_dtype)
        if compute_dtype is Dtype.auto:
            use_float32 = platform == "cpu" and not cpu_prefers_bfloat16()
            compute_dtype = Dtype.float32 if use_float32 else Dtype.bfloat16
        grouped = self.parts.choose_grouped(platform)
        expert_quantization = None
        if quantization is not None and grouped is not Grouped.megablox:
            is_float8 = quantization.dtype is ComputeDtype.float8
            expert_quantization = quantization if is_float8 else None
        reduce_dtype = train.reduce_dtype
        if reduce_dtype is Dtype.auto:
            reduce_dtype = Dtype.float32 if platform == "cpu" else compute_dtype
        activation_dtype = Dtype.float32 if platform == "cpu" else compute_dtype
        numerics = Numerics(
            activation_dtype=jnp.dtype(activation_dtype),
            compute_dtype=jnp.dtype(compute_dtype),
            reduce_dtype=jnp.dtype(reduce_dtype),
            quantization=quantization,
            expert_quantization=expert_quantization,
        )
        pipeline = None
        if (stages := self.sizes["pipeline"]) > 1:
            schedule = pipeline_of(config.mesh, train, stages)
            pipeline = self.parts.make_pipeline(schedule.microbatches, schedule.repeats)
        normalize = None
        if config.runtime.gpu_tuning:
            normalize = self.parts.choose_norm(platform, config.model.embed_dim)
        context = self._context_attention(kernel)
        return Execution(
            numerics=numerics,
            attention=self.parts.make_attention(kernel, context),
            expert_exchange=self._expert_exchange(),
            grouped=grouped,
            normalize=normalize,
            remat=train.remat,
            offload=train.offload,
            layer_unroll=self.layer_unroll(),
            pipeline=pipeline,
        )

    def placement(self, mesh: Mesh, axis_steps: tuple[AxisSteps, ...]) -> Placement:
        """Return the placement of arrays, and how devices exchange weights."""
        config = self.config
        rules = self.rules
        train = config.train
        data = config.data
        shards = batch_shards(rules, mesh.shape)
        rows = data.batch_size // (train.accumulation_steps * shards.rows)
        length = data.sequence_length // shards.sequence
        pipelined = mesh.shape["pipeline"] > 1
        placement = Placement(
            mesh=mesh,
            rules=rules,
            platform=mesh.devices.flat[0].platform,
            axis_steps=axis_steps,
            # Without microbatches, a layer has a single backward pass in a step.
            reduce_in_layers=train.accumulation_steps == 1 and not pipelined,
            exchange_embedding_rows=rows * length < config.model.vocab_rows,
            microbatch_shape=(rows, length),
        )
        return replace(placement, scatters_tables=scatters_tables(placement))

    def layer_unroll(self) -> int:
        """Return how many layers an iteration of the scan runs. -1 means all layers.

        A loop copies what the forward pass saves into arrays of all layers, and the
        backward pass copies it back. Without a loop, a GPU trains a model of 12 layers
        1.3 times as fast. But the time to compile grows with the number of layers, and
        a model that recomputes gains little and needs more memory. If weights are
        sharded, XLA merges the gathers of both passes, and holds the gathered weights
        of all layers (docs/log/gpu.md).
        """
        model = self.config.model
        remat = self.config.train.remat
        if model.layer_unroll is not None:
            return model.layer_unroll
        params = self.rules.params
        is_sharded = any(num_shards(self.sizes, axes) > 1 for _, axes in params)
        is_shallow = model.num_layers <= _MOST_UNROLLED
        is_gpu = self.device.platform == "gpu"
        if is_gpu and is_shallow and remat is Remat.none and not is_sharded:
            return -1
        return 1

    def _context_attention(self, kernel: Attention) -> ContextAttention | None:
        """Choose how devices that share a row attend, or None if no devices do."""
        config = self.config
        rules = self.rules
        sizes = self.sizes
        setting = config.mesh.context_attention
        length = config.data.sequence_length
        devices = num_shards(sizes, rules.spec("seq")[0])
        if devices == 1:
            return None
        self._check_pieces(devices)
        model = config.model
        head_axes, kv_axes = (rules.spec(axis)[0] for axis in ("heads", "kv_heads"))
        kv_heads = model.kv_heads // num_shards(sizes, kv_axes)
        if head_axes != kv_axes:
            # `attend` then repeats each key head for its query heads.
            kv_heads = model.num_heads // num_shards(sizes, head_axes)
        row_shards = num_shards(sizes, rules.spec("batch")[0])
        rows = config.data.batch_size // (row_shards * config.train.accumulation_steps)
        # The keys and values are in bfloat16 wherever splash runs.
        head_dims = model.head_size + model.value_size
        kv_bytes = 2 * rows * length * kv_heads * head_dims
        if rate := model.dropout.attention:
            rule = (
                f"must be 0 if {devices} devices share a row, because no device has "
                "all weights of a query; set mesh.context=1, or use only "
                "model.dropout.embedding and model.dropout.residual"
            )
            raise ConfigError([Mistake("model.dropout.attention", rate, rule)])
        algorithm = self.parts.choose_context_attention(
            setting,
            kernel,
            devices,
            length,
            kv_heads,
            None if config.train.remat is Remat.none else kv_bytes,
        )
        if isinstance(algorithm, Mistake):
            raise ConfigError([algorithm])
        return algorithm

    def _check_pieces(self, devices: int) -> None:
        """Refuse rows whose pieces on a device are too short for a mixer."""
        model = self.config.model
        length = self.config.data.sequence_length
        pieces = 2 * devices
        for mixer in dict.fromkeys(model.mixers):
            least_piece = kinds_of(model)[mixer].least_piece
            if least_piece is None:
                continue
            least = least_piece(model)
            shortest = pieces * least.positions
            if length < shortest:
                rule = (
                    f"must be at least {shortest}: {devices} devices share a row in up "
                    f"to {pieces} pieces, and {least.reason} positions in each; use "
                    "longer rows or a smaller mesh.context"
                )
                related = (f"model.{least.key}", "mesh.context")
                mistake = Mistake("data.sequence_length", length, rule, related)
                raise ConfigError([mistake])

    def _expert_exchange(self) -> ExpertExchange:
        """Choose how tokens reach experts on other devices.

        A device has n tokens, a token goes to k experts, and S devices share the
        experts. `all_gather` sends 2 n (S - 1) rows per device, and `ragged` at most
        2 n k (S - 1) / S rows, which pass through main memory once instead of once in
        each chunk (model/parts/experts/exchange.py). `all_to_all` sends half as many
        rows again. On GPUs `ragged` must be set explicitly: wrong gradients were
        reported (marin-community/marin#8077), and it is untested there.
        """
        config = self.config
        device = self.device
        sizes = self.sizes
        setting = config.mesh.expert_exchange
        chip = chip_of(device.device_kind)
        devices = num_shards(sizes, dict(self.rules.params)["experts"])
        dcn = config.mesh.dcn
        slice_size = math.prod(
            size // getattr(dcn, axis) for axis, size in sizes.items()
        )
        max_size = chip and chip.max_ragged_devices
        is_too_large = max_size is not None and slice_size > max_size
        if setting is ExpertExchange.ragged and is_too_large and devices > 1:
            rule = (
                f"is not possible on {device.device_kind}: XLA compiles a ragged "
                f"all-to-all only for slices of at most {max_size} devices, and a "
                f"slice has {slice_size}; set mesh.expert_exchange=auto"
            )
            raise ConfigError([Mistake("mesh.expert_exchange", setting.value, rule)])
        if setting is not ExpertExchange.auto:
            return setting
        if devices < config.model.experts_per_token:
            return ExpertExchange.all_gather
        if device.platform == "tpu" and not is_too_large:
            return ExpertExchange.ragged
        is_gpu = device.platform == "gpu"
        return ExpertExchange.all_to_all if is_gpu else ExpertExchange.all_gather

    def _kernel(self) -> Attention:
        """Return the attention kernel."""
        model = self.config.model
        device = self.device
        length = self.config.data.sequence_length
        kernel = self.parts.choose_kernel(
            model.attention,
            device.platform,
            length,
            model.head_size,
            value_dim=model.value_size,
            soft_cap=model.attention_soft_cap is not None,
            sinks=model.attention_sinks,
            dropout=model.dropout.attention > 0,
        )
        if isinstance(kernel, Mistake):
            raise ConfigError([kernel])
        if kernel.is_cudnn and (rule := _unfit_for_cudnn(model, kernel, device)):
            raise ConfigError([Mistake("model.attention", kernel.value, rule)])
        return kernel

    def _quantization(self) -> Quantization | None:
        """Return how linear layers are quantized, or None if they are not.

        A CPU emulates 8-bit products, so that users can try them there.
        """
        device = self.device
        dtype = self.config.model.compute_dtype
        if dtype not in (ComputeDtype.float8, ComputeDtype.int8):
            return None
        if device.platform == "cpu":
            return self.parts.quantizations[dtype](True)
        chip = chip_of(device.device_kind)
        if chip is None or not chip.is_faster_in(dtype):
            rule = f"is no faster than bfloat16 on {device.device_kind}; set bfloat16"
            alternative = {"float8": "int8", "int8": "float8"}[dtype]
            if chip is not None and chip.is_faster_in(alternative):
                rule += f" or {alternative}"
            raise ConfigError([Mistake("model.compute_dtype", dtype.value, rule)])
        return self.parts.quantizations[dtype](False)

    def _check_host_memory(self) -> None:
        """Refuse offloaded int8 moments on TPUs with jax < 0.11 (libtpu 0.0.44)."""
        optimizer = self.config.optimizer
        platform = self.device.platform
        is_old = jax.__version_info__ < (0, 11)
        is_int8 = optimizer.moment_dtype is MomentDtype.int8
        if is_old and platform == "tpu" and optimizer.offload and is_int8:
            rule = (
                f"cannot be in a TPU's host memory with jax {jax.__version__}; "
                "install jax 0.11 or later (Python 3.12), or set bfloat16"
            )
            raise ConfigError([Mistake("optimizer.moment_dtype", "int8", rule)])


def _unfit_for_cudnn(model: ModelConfig, kernel: Attention, device: Device) -> str:
    """Return why cuDNN's kernel cannot run on this GPU, or an empty string."""
    name = device.device_kind
    or_xla = "or model.attention=xla (slower)"
    chip = chip_of(name)
    version = getattr(device, "compute_capability", None)
    is_hopper = chip is None or chip.is_faster_in("float8")
    if version is not None:
        is_hopper = float(version) >= 9
    if model.compute_dtype is ComputeDtype.float32:
        return f"does not multiply float32; set model.compute_dtype=auto {or_xla}"
    if kernel is Attention.cudnn_packed and not is_hopper:
        return f"needs Hopper or later, not {name}; set model.attention=cudnn {or_xla}"
    if model.head_size > _CUDNN_HEAD_DIM and not is_hopper:
        rule = f"needs heads of at most {_CUDNN_HEAD_DIM} dims on {name}, not "
        rule += f"{model.head_size}; set model.attention=xla (slower)"
        return f"{rule}, or use Hopper or later"
    return ""
