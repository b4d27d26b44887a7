"""Compute how long a device's matrix units and main memory are busy in a step.

On TPUs, products run at the achievable fraction of the peak times the fraction of the
matrix units that the model's dims fill. On GPUs, the rate of products grows with the
contracted dim, and the rate of attention depends on the head dim and the row length.
Products of rows grouped by expert run at a fraction of the rate of other products, and
no faster than main memory supplies their tiles.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from jax.sharding import Mesh

from model.config import ModelConfig
from train.config import Config
from train.hardware.chips import Chip
from train.hardware.interconnect import Group, bandwidth, stated
from train.plan.cost import StepCost


@dataclass(frozen=True)
class Rates:
    """The achievable rates of one JAX device, per second.

    flops: FLOPs of matrix products that fill the units.
    memory: bytes to and from main memory.
    send: returns the bytes that the device can send to a group.
    eight_bits: FLOPs of matrix products whose operands have eight bits.
    """

    flops: float
    memory: float
    send: Callable[[Group], float]
    eight_bits: float


def rates_of(mesh: Mesh, chip: Chip, compute: str = "auto") -> Rates:
    """Return the achievable rates of a chip; `compute` is `model.compute_dtype`.

    Raises:
        NotStated: if the vendor does not state a figure. `Rates.send` raises it too.
    """
    achievable, bfloat16 = chip.achievable, chip.flops["bfloat16"]
    return Rates(
        flops=achievable.products * bfloat16 / chip.devices,
        memory=achievable.memory * stated(chip, "hbm_bandwidth") / chip.devices,
        send=lambda group: bandwidth(
            mesh, group.axes, group.network, chip, group.links
        ),
        eight_bits=(
            achievable.products * chip.flops.get(compute, bfloat16) / chip.devices
        ),
    )


@dataclass(frozen=True)
class BusyTimes:
    """The busy times of a device's units in a step.

    products: seconds of matrix products, ignoring memory.
    memory: seconds of all memory traffic.
    product_memory: seconds of the memory traffic of products.
    fill: the fraction of the rate of products that the model's dims allow.
    """

    products: float
    memory: float
    product_memory: float
    fill: float


def busy_times_of(cost: StepCost, config: Config, mesh: Mesh, chip: Chip) -> BusyTimes:
    """Return how long a device computes, reads and writes in a step.

    Raises:
        NotStated: if the vendor does not state a figure.
    """
    model, length = config.model, config.data.sequence_length
    rates = rates_of(mesh, chip, model.compute_dtype)
    flops, hbm_bytes = cost.flops, cost.hbm_bytes
    saved_s = flops.eight_bits * (1 / rates.flops - 1 / rates.eight_bits)
    tensor, attention_rates = mesh.shape["tensor"], chip.achievable.attention
    if attention_rates is None:
        fill, attention_fill = matrix_fill(model, tensor, chip.matrix_unit)
        padded_flops = flops.products / fill + flops.attention / attention_fill
        products_s = padded_flops / rates.flops - saved_s / fill
        fill = flops.total / padded_flops if padded_flops else 1.0
    else:
        fill = depth_fill(model, tensor, chip.achievable.half_depth)
        peak = chip.flops["bfloat16"] / chip.devices
        fraction = attention_rates.fraction(model.head_size, length)
        attention_s = flops.attention / (fraction * peak)
        # The time lost in short contractions does not depend on the operands' dtype.
        products_s = flops.products / fill / rates.flops - saved_s + attention_s
    grouped = chip.achievable.grouped
    tile_rate = grouped.intensity * rates.memory
    slowdown = max(1 / grouped.rate, rates.flops * fill / tile_rate)
    products_s += (slowdown - 1) * flops.grouped / fill / rates.flops
    memory_s = hbm_bytes.total / rates.memory
    return BusyTimes(products_s, memory_s, hbm_bytes.products / rates.memory, fill)


def matrix_fill(
    model: ModelConfig, tensor: int, unit: int | None
) -> tuple[float, float]:
    """Return the fractions of matrix units that weights and attention fill.

    A dim that is not a multiple of a unit's rows or columns leaves some of them idle;
    if `unit` is None, any dim fills the units. `tensor` devices share a layer.
    """
    if unit is None:
        return 1.0, 1.0

    def padded(dim: int) -> int:
        return math.ceil(dim / unit) * unit

    matrices = _matrices(model, tensor)
    used = sum(rows * columns for rows, columns in matrices)
    padded_area = sum(padded(rows) * padded(columns) for rows, columns in matrices)
    return used / padded_area, model.head_size / padded(model.head_size)


def depth_fill(model: ModelConfig, tensor: int, half_depth: float) -> float:
    """Return the fraction of the rate of long contractions that products reach.

    Each matrix is in three products. The forward pass contracts the matrix's rows, the
    gradient of the input contracts the columns, and the matrix's gradient contracts
    the tokens. A contraction of `half_depth` elements reaches half of the rate, and
    the contraction of the tokens is assumed to reach all of it.
    """
    matrices = _matrices(model, tensor)
    used = sum(rows * columns for rows, columns in matrices)
    lost = sum((half_depth * m + half_depth * n) / 3 for n, m in matrices)
    return used / (used + lost)


def _matrices(model: ModelConfig, tensor: int) -> list[tuple[int, int]]:
    """Return the local rows and columns of the matrices that multiply a token."""
    D, H = model.embed_dim, model.head_size
    heads, kv = model.num_heads * H // tensor, max(1, model.kv_heads // tensor) * H
    attention = [(D, heads)] * 2 + [(D, kv)] * 2
    matrices_per_mlp, expert_layers = 3 if model.gated else 2, model.expert_layers
    # The shared experts are one MLP (model/experts/experts.py).
    F, shared = model.expert_size, model.shared_experts * model.expert_size
    sizes = [model.mlp_size] * (model.num_layers - expert_layers)
    sizes += [*[F] * model.experts_per_token, shared] * expert_layers
    mlps = [(D, size // tensor) for size in sizes if size] * matrices_per_mlp
    head = (D, (model.vocab_size or 1) // tensor)
    return [*attention * model.num_layers, *mlps, head]
