"""How long a step takes: what it computes, reads and sends, at the rates of chips.

Each resource gets the time that it is busy: matrix units, main memory, and every
network along every set of mesh axes (a lane). From those follows the time of a step:

optimistic: matrix units and memory work at the same time, and collectives beside both,
    but for those that a layer must wait for: activations along tensor, context and
    expert axes that the schedule does not put beside products.
pessimistic: only matrix products hide their own memory traffic, all other instructions
    wait for memory one after the other; no collective hides behind anything but the
    products that it is scheduled beside, one after the other.

The middle of a range is the mean of both times. Rates are the vendors'
(hardware/chips.py) times what programs get of them (hardware/achievable.py), and for
matrix products times what the model's dims fill of the matrix units. Input, checkpoints
and launches of kernels are not in it.

FLOPs, bytes and seconds are of one JAX device and one step.
"""

import math
from collections.abc import Iterable

from jax.sharding import Mesh

from model.config import Activation, ModelConfig
from train.hardware.achievable import achievable
from train.hardware.chips import Chip
from train.hardware.interconnect import NotStated, bandwidth, hops
from train.plan.cost import CollectiveTotal, StepCost
from train.plan.prediction import Lane, Prediction, Range

_WAITED_FOR = {"tensor", "context", "expert"}  # axes that carry activations


def predict(
    cost: StepCost, mesh: Mesh, chip: Chip, model: ModelConfig, tokens: int
) -> Prediction:
    """Predict the speed of a step.

    Args:
        cost: what one device does in it.
        mesh: its devices, which need not be there.
        chip: of each device.
        model: whose dims fill the matrix units more or less.
        tokens: of a step, all devices together.

    Raises:
        NotStated: if the vendor does not say how fast something is that the step needs.
    """
    if chip.hbm_bandwidth is None:
        raise NotStated(f"{chip.kind}: its vendor does not state hbm_bandwidth")
    platform = mesh.devices.flat[0].platform
    part = achievable(platform)
    flops, peak = cost.flops, chip.flops["bfloat16"] / chip.devices
    fill, attention_fill = matrix_fill(model, mesh.shape["tensor"], chip.matrix_unit)
    filled = flops.products / fill + flops.attention / attention_fill
    products = filled / (peak * part.products)
    rate = part.memory * chip.hbm_bandwidth / chip.devices
    lanes = _lanes(cost.sent, mesh, chip)
    memory, product_memory = cost.hbm_bytes.total / rate, cost.hbm_bytes.products / rate
    return Prediction(
        products=products,
        memory=memory,
        product_memory=product_memory,
        lanes=lanes,
        fill=flops.total / filled if filled else 1.0,
        recomputed=flops.total / cost.model_flops,
        step_s=_step(products, memory, product_memory, lanes),
        tokens=tokens,
        devices=mesh.size,
        chips=mesh.size // chip.devices,
        model_flops=cost.model_flops,
        peak=peak,
        how=cost.how,
        platform="tpu" if platform == "tpu" else "gpu",
    )


def _step(
    products: float, memory: float, product_memory: float, lanes: Iterable[Lane]
) -> Range:
    free = [lane.seconds - lane.waited_for for lane in lanes]
    waited_for = sum(lane.waited_for for lane in lanes)
    low = max(products, memory, *free, 0.0) + waited_for
    hidden = sum(lane.hidden for lane in lanes)
    exposed = sum(lane.exposed for lane in lanes)
    high = max(products, product_memory, hidden) + memory - product_memory + exposed
    return Range(low, high)


def _lanes(sent: Iterable[CollectiveTotal], mesh: Mesh, chip: Chip) -> tuple[Lane, ...]:
    groups = dict[tuple[tuple[str, ...], str], list[CollectiveTotal]]()
    for total in sent:
        groups.setdefault((total.axes, total.network), []).append(total)
    lanes = []
    for (axes, network), totals in groups.items():
        rate = bandwidth(mesh, axes, network, chip)
        far = hops(mesh, axes, network)
        seconds = [
            t.sent * (far if t.kind.endswith("all-to-all") else 1.0) / rate
            for t in totals
        ]
        hidden = sum(s * t.overlapped for s, t in zip(seconds, totals, strict=True))
        exposed = sum(seconds) - hidden
        lane = Lane(
            axes=axes,
            network=network,
            bandwidth=rate,
            sent=sum(t.sent for t in totals),
            seconds=sum(seconds),
            hidden=hidden,
            waited_for=exposed if _WAITED_FOR & {*axes} else 0.0,
        )
        lanes.append(lane)
    return tuple(sorted(lanes, key=lambda lane: -lane.seconds))


def matrix_fill(
    model: ModelConfig, tensor: int, unit: int | None
) -> tuple[float, float]:
    """Give the parts of matrix units that products with weights, and attention, use.

    A dim that is no multiple of a unit's rows or columns leaves some of them idle.

    Args:
        model: with its vocabulary.
        tensor: devices that share a layer.
        unit: rows and columns of a matrix unit; None: small enough for any dim.
    """
    if unit is None:
        return 1.0, 1.0

    def padded(dim: int) -> int:
        return math.ceil(dim / unit) * unit

    D, H = model.embed_dim, model.head_size
    heads, kv = model.num_heads * H // tensor, max(1, model.kv_heads // tensor) * H
    F = model.mlp_size // tensor
    widened = 3 if model.activation is Activation.swiglu else 2
    of_a_layer = [(D, heads)] * 2 + [(D, kv)] * 2 + [(D, F)] * widened
    matrices = of_a_layer * model.num_layers + [(D, (model.vocab_size or 1) // tensor)]
    used = sum(rows * columns for rows, columns in matrices)
    taken = sum(padded(rows) * padded(columns) for rows, columns in matrices)
    return used / taken, H / padded(H)
