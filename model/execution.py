"""How a model is run, as opposed to what it computes.

`Execution` is fixed for a program. `CallContext` differs between calls and layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

from model.attention.method import PLAIN_ATTENTION, AttentionMethod
from model.choices import ExpertExchange, Grouped, OffloadName
from model.gather import WeightPlacement
from model.placement import ONE_DEVICE, Placement
from model.products import GatheringQuantization, Quantization
from model.remat import Policy
from model.rope import Rotations
from model.routing import Routing
from model.taps import Taps


class Numerics(NamedTuple):
    """The dtypes of a program.

    activation_dtype: the dtype of activations between layers.
    compute_dtype: the dtype of the operands of products, and of gathered weights.
    reduce_dtype: the dtype in which gradients of weights are summed over devices.
    quantization: how linear layers multiply in eight bits, or None.
    expert_quantization: how experts multiply in eight bits (only in float8), or None.
    """

    activation_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    compute_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    reduce_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    quantization: Quantization | None = None
    expert_quantization: GatheringQuantization | None = None

    @property
    def rounds_stochastically(self) -> bool:
        """Whether linear layers need random keys."""
        quantization = self.quantization
        return quantization is not None and quantization.is_random


class Execution(NamedTuple):
    """How a program runs the model. Every `auto` is already resolved.

    attention: how devices attend to the keys of their rows.
    expert_exchange: how tokens reach experts on other devices.
    grouped: the kernel that multiplies rows, grouped by expert.
    normalize: the kernel of norms in layers. None leaves them to XLA.
    remat: which results the backward pass recomputes (model/remat.py).
    offload: the names of the results that are saved in host memory.
    layer_unroll: the number of layers in an iteration of the scan; -1 means all layers.
    pipeline: runs layers that are sharded over stages. None without a pipeline.
    """

    numerics: Numerics = Numerics()
    placement: Placement = ONE_DEVICE
    attention: AttentionMethod = PLAIN_ATTENTION
    expert_exchange: ExpertExchange = ExpertExchange.all_gather
    grouped: Grouped = Grouped.scan
    normalize: "NormKernel | None" = None
    remat: Policy = "none"
    offload: tuple[OffloadName, ...] = ()
    layer_unroll: int = 1
    pipeline: "Pipeline | None" = None

    def weight_placement(self, axes: tuple[str, ...]) -> WeightPlacement:
        """Return the sharding and the collectives of a weight with logical `axes`."""
        placement = self.placement
        sharded_dims = placement.sharded_dims(axes)
        automatic_spec = placement.param_spec(axes)
        if any(automatic_spec[dim] for dim, _ in sharded_dims):
            # If manual and automatic axes shard the same dim, XLA decides the order of
            # its shards. Therefore the automatic sharding is left to XLA.
            automatic_spec = PartitionSpec()
        return WeightPlacement(
            sharded_dims=sharded_dims,
            replica_axes=(
                placement.replica_axes(axes) if placement.reduce_in_layers else ()
            ),
            reduce_dtype=self.numerics.reduce_dtype,
            automatic_spec=automatic_spec,
            gather_again=bool(sharded_dims) and self.remat == "none",
            platform=placement.platform,
            axis_steps=placement.axis_steps,
            is_stack=len(axes) == 3 and axes[0] == "experts",
            has_automatic_axes=bool(placement.automatic_axes),
        )


class CallContext(NamedTuple):
    """Values that layers read and that belong to one call of the model.

    segment_ids_BT: int32 document id of each position. None: each row is one document.
    positions_BT: int32, from 0 in each document, for token shifts.
    rotations: the rotations of queries and keys, if positions are rotary.
    router_ids_BT: like segment_ids_BT, for the statistics of routers. None means
        segment_ids_BT.
    keys_BT: a random key for each position, for dropout and stochastic rounding.
        Without keys nothing is dropped, and values are rounded to the nearest.
    taps: records statistics of intermediate results. None records nothing.
    trained_length: with a cache, how many of the newest keys a query sees. None means
        all keys.
    high_precision: whether the current layer multiplies in the compute dtype even if
        other layers quantize.
    """

    segment_ids_BT: Int[Array, "B T"] | None = None
    positions_BT: Int[Array, "B T"] | None = None
    rotations: Rotations | None = None
    router_ids_BT: Int[Array, "B T"] | None = None
    keys_BT: Key[Array, "B T"] | None = None
    taps: Taps | None = None
    trained_length: int | None = None
    high_precision: bool = False

    def note(self, name: str, x: jax.Array) -> None:
        """Record the largest absolute value of a result. Without taps, do nothing."""
        if self.taps is not None:
            self.taps.note(name, x)

    def note_scores(self, bound_N: jax.Array) -> None:
        """Record the bound of each head's scores. Without taps, do nothing."""
        if self.taps is not None:
            self.taps.note_scores(bound_N)

    def fold_in(self, number: int | jax.Array) -> "CallContext":
        """Return the context with a number folded into its random keys."""
        if self.keys_BT is None:
            return self
        fold_in = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))
        return self._replace(keys_BT=fold_in(self.keys_BT, number))


NO_CONTEXT = CallContext()

# Normalizes rows: from (x [..., D], scale [D], bias [D] or None, the epsilon, whether
# the mean is subtracted) to (x for the residual, x normalized).
NormKernel = Callable[
    [jax.Array, jax.Array, jax.Array | None, float, bool], tuple[jax.Array, jax.Array]
]

# Runs a group of layers on one microbatch, from (local parameters of the group, x_BTD,
# positions_BT, the group's number over all stages, the call) to (x_BTD, routing).
RunGroup = Callable[
    [Any, jax.Array, Any, jax.Array, CallContext], tuple[jax.Array, Routing | None]
]


@runtime_checkable
class Pipeline(Protocol):
    """Runs layers that are sharded over the stages of a pipeline.

    An instance is hashed by its values. Shapes: B batch, T time, D embed, L layers.
    """

    def run(
        self,
        run_group: RunGroup,
        params: Any,
        x_BTD: Float[Array, "B T D"],
        positions_BT: jax.Array | None,
        execution: Execution,
        *,
        call: CallContext = NO_CONTEXT,
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Run all layers on the local rows.

        `params` is a tree of the parameters of this stage's layers. x_BTD, positions_BT
        and `call` hold the local rows.

        Returns:
            The output of the last layer for local rows, and the routing: the load of
            all L layers, and the loss [L], which is zero for layers of other stages.
        """
        ...
