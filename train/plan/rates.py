"""How long a device's own units are busy in a step: matrix units and main memory.

TPU: products at what programs get of the peak, times what the model's dims fill of the
matrix units. GPU: products at a rate that grows with the dim they contract, attention
at the rate of its kernel, by head dim and length of rows. Products of rows grouped by
expert: at a part of the rate of others, and no faster than memory brings their tiles.
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
    """What one JAX device does in a second.

    flops: of matrix products that fill the units.
    memory: bytes from and to main memory.
    send: bytes to a group.
    eight_bits: likewise of matrix products whose operands have eight bits.
    """

    flops: float
    memory: float
    send: Callable[[Group], float]
    eight_bits: float


def rates_of(mesh: Mesh, chip: Chip, compute: str = "auto") -> Rates:
    """Return what programs get of the vendor's figures; compute: model.compute_dtype.

    Raises:
        NotStated: if the vendor does not state a figure, also when it is asked for.
    """
    part, bfloat16 = chip.achievable, chip.flops["bfloat16"]
    return Rates(
        flops=part.products * bfloat16 / chip.devices,
        memory=part.memory * stated(chip, "hbm_bandwidth") / chip.devices,
        send=lambda group: bandwidth(
            mesh, group.axes, group.network, chip, group.links
        ),
        eight_bits=part.products * chip.flops.get(compute, bfloat16) / chip.devices,
    )


@dataclass(frozen=True)
class Busy:
    """What a device's units do in a step.

    products: seconds of matrix products, if memory is no obstacle.
    memory: seconds of all memory traffic; product_memory: of those beside products.
    fill: part of the rate of products that the model's dims allow.
    """

    products: float
    memory: float
    product_memory: float
    fill: float


def busy(cost: StepCost, config: Config, mesh: Mesh, chip: Chip) -> Busy:
    """Return how long a device computes, reads and writes in a step.

    The model's dims fill the matrix units more or less.

    Raises:
        NotStated: as `rates_of`.
    """
    model, length = config.model, config.data.sequence_length
    rates = rates_of(mesh, chip, model.compute_dtype)
    flops, hbm_bytes = cost.flops, cost.hbm_bytes
    saved = flops.eight_bits * (1 / rates.flops - 1 / rates.eight_bits)
    tensor, kernel = mesh.shape["tensor"], chip.achievable.attention
    if kernel is None:
        fill, attention_fill = matrix_fill(model, tensor, chip.matrix_unit)
        filled = flops.products / fill + flops.attention / attention_fill
        products = filled / rates.flops - saved / fill
        fill = flops.total / filled if filled else 1.0
    else:
        fill = depth_fill(model, tensor, chip.achievable.half_depth)
        peak = chip.flops["bfloat16"] / chip.devices
        attention = flops.attention / (kernel.part(model.head_size, length) * peak)
        # What short contractions lose is time that does not depend on the operands.
        products = flops.products / fill / rates.flops - saved + attention
    part = chip.achievable.grouped
    slowed = max(1 / part.rate, rates.flops * fill / (part.intensity * rates.memory))
    products += (slowed - 1) * flops.grouped / fill / rates.flops
    memory, product_s = (
        hbm_bytes.total / rates.memory,
        hbm_bytes.products / rates.memory,
    )
    return Busy(products, memory, product_s, fill)


def matrix_fill(
    model: ModelConfig, tensor: int, unit: int | None
) -> tuple[float, float]:
    """Return the parts of matrix units that products with weights, and attention, use.

    A dim that is no multiple of a unit's rows or columns leaves some of them idle.
    None: they are few enough for any dim. `tensor` devices share a layer.
    """
    if unit is None:
        return 1.0, 1.0

    def padded(dim: int) -> int:
        return math.ceil(dim / unit) * unit

    matrices = _matrices(model, tensor)
    used = sum(rows * columns for rows, columns in matrices)
    padded_area = sum(padded(rows) * padded(columns) for rows, columns in matrices)
    return used / padded_area, model.head_size / padded(model.head_size)


def depth_fill(model: ModelConfig, tensor: int, half: float) -> float:
    """Return the part of the rate of long contractions that a model's products reach.

    Each matrix is multiplied three times: contracted are its rows forward, its columns
    for the gradient of what it was multiplied with, tokens for its own.
    Half of it is reached at `half` contracted elements. `tensor` devices share a layer.
    """
    matrices = _matrices(model, tensor)
    used = sum(rows * columns for rows, columns in matrices)
    lost = sum((half * columns + half * rows) / 3 for rows, columns in matrices)
    return used / (used + lost)


def _matrices(model: ModelConfig, tensor: int) -> list[tuple[int, int]]:
    """Return rows and columns of a device's part of what a token is multiplied with."""
    D, H = model.embed_dim, model.head_size
    heads, kv = model.num_heads * H // tensor, max(1, model.kv_heads // tensor) * H
    attention = [(D, heads)] * 2 + [(D, kv)] * 2
    widened, with_experts = 3 if model.gated else 2, model.expert_layers
    # Experts that every token takes are one MLP (model/experts/experts.py).
    F, shared = model.expert_size, model.shared_experts * model.expert_size
    sizes = [model.mlp_size] * (model.num_layers - with_experts)
    sizes += [*[F] * model.experts_per_token, shared] * with_experts
    mlps = [(D, size // tensor) for size in sizes if size] * widened
    head = (D, (model.vocab_size or 1) // tensor)
    return [*attention * model.num_layers, *mlps, head]
