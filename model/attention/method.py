"""The interface of attention, and attention without kernels or shared rows.

A program chooses its method of attention once, as a value (`Execution.attention`).
model/parts/attention.py has the method of programs that train on many devices.

Shapes: B batch, T query time, S key time, N query heads, K key/value heads, H head dim,
V value dim.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, Bool

from model.attention import masks, xla
from model.attention.inputs import Attended, Inputs
from model.choices import Attention, ContextAttention
from model.placement import ONE_DEVICE, Placement


class AttentionOptions(NamedTuple):
    """Options of attention. None disables a feature.

    compute: the dtype of the operands of products.
    placement: the placement of the rows and heads.
    window: the largest number of keys that a query sees, its own included.
    local_flag: decides at run time whether the window applies to this layer.
    soft_cap: the number c that turns scores into c tanh(score / c).
    drop: applies dropout to the weights. Only `xla` supports it, and only if no two
        devices share a row.
    """

    compute: DTypeLike
    placement: Placement = ONE_DEVICE
    window: int | None = None
    local_flag: Bool[Array, ""] | None = None
    soft_cap: float | None = None
    drop: xla.Drop | None = None


@runtime_checkable
class AttentionMethod(Protocol):
    """Causal attention within documents. An instance is hashed by its values."""

    @property
    def kernel(self) -> Attention:
        """The kernel, which is not `auto`."""
        ...

    @property
    def context(self) -> ContextAttention | None:
        """How devices that share rows attend, or None if no devices share a row."""
        ...

    @property
    def scales_queries(self) -> bool:
        """Whether `attend` scales queries by 1/sqrt(H). Otherwise its caller does."""
        ...

    @property
    def in_ring_order(self) -> bool:
        """Whether devices that share a row have two pieces of it, as `arrange` says."""
        ...

    def arrange(self, x_BT: Array, axes: tuple[str, ...]) -> Array:
        """Return a device's positions of rows in the order that `attend` expects.

        Devices share the rows over the manual mesh axes `axes`. Either each keeps its
        positions, or each gets two chunks of every row, so that all devices have the
        same amount of work (model/parts/context/ring.py).
        """
        ...

    def attend(self, inputs: Inputs, options: AttentionOptions) -> Attended:
        """Attend from each position to itself and to earlier ones of its document.

        The output has the dtype of the queries. T equals S, unless keys and values are
        already gathered for `all_gather`. Each device computes its local shard.
        """
        ...


@dataclass(frozen=True)
class PlainAttention:
    """Attention by two products and a softmax, for rows that no devices share.

    It stores the [B, N, T, S] scores in memory, and runs on every platform. XLA's
    partitioner shards its heads.
    """

    kernel: Attention = Attention.xla
    context: ContextAttention | None = None
    scales_queries: bool = True
    in_ring_order: bool = False

    def arrange(self, x_BT: Array, axes: tuple[str, ...]) -> Array:
        """Return x_BT."""
        return x_BT

    def attend(self, inputs: Inputs, options: AttentionOptions) -> Attended:
        """Attend as `AttentionMethod.attend` does."""
        assert not options.placement.sequence_axes
        T = inputs.q_BTNH.shape[1]
        window = options.window
        if window is not None and window >= T:
            window = None
        layer_window = masks.layer_window(window, options.local_flag, T)
        mask_BTS = masks.causal_mask(T, inputs.segment_ids_BS, layer_window)
        return xla.attend_masked(
            inputs,
            mask_BTS,
            options.compute,
            soft_cap=options.soft_cap,
            drop=options.drop,
            causal=True,
        )


PLAIN_ATTENTION = PlainAttention()
