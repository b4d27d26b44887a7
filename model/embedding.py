"""Embedding tables, with one row for each token or position.

Shapes: B batch, T time, D embed.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.config import ModelConfig
from model.execution import Execution
from model.gather import WeightPlacement
from model.params import Kind, ParamInfo
from model.scopes import part_scope


class Table(nnx.Module):
    """An embedding table that is looked up by id."""

    def __init__(
        self,
        config: ModelConfig,
        size: int,
        axis: str,
        std: float,
        rngs: nnx.Rngs,
        padding: int = 0,
    ):
        """Draw `size` rows from N(0, std²), and append `padding` rows of zeros.

        `axis` is the logical axis of the rows.
        """
        shape = (size, config.embed_dim)
        dtype = jnp.dtype(config.param_dtype)
        weight = std * jax.random.normal(rngs.params(), shape, dtype)
        self.axes = axis, "embed"
        self.weight = nnx.Param(
            jnp.pad(weight, ((0, padding), (0, 0))) if padding else weight,
            info=ParamInfo(self.axes, Kind.table, padding=padding),
        )

    def __call__(
        self, ids: Int[Array, "*dims"], placement: WeightPlacement
    ) -> Float[Array, "*dims D"]:
        """Gather the table as `placement` says, and return the rows of int32 ids."""
        with part_scope("embedding"):
            table = placement.gather(self.weight[...])
            return jnp.take(table, ids, axis=0, mode="clip")


def look_up(
    lookups: Sequence[tuple[Table, Int[Array, "B T"]]], execution: Execution
) -> Float[Array, "B T D"]:
    """Return the sum of the rows of several tables, in the activation dtype.

    A device may hold only some columns of a table. If the rows to look up are smaller
    than the table (`exchange_embedding_rows`), the device looks up its columns of the
    rows of all devices that share the table. One all-to-all then converts x from local
    columns [B, T, D/fsdp] to local rows [B/fsdp, T, D]. Otherwise, each device gathers
    the table.
    """
    column_axes: tuple[str, ...] = ()
    if execution.placement.exchange_embedding_rows:
        sharded_dims = execution.placement.sharded_dims(lookups[0][0].axes)
        column_axes = dict(sharded_dims).get(1, ())
    x_BTD = jnp.zeros((), jnp.float32)
    for table, ids_BT in lookups:
        placement = execution.weight_placement(table.axes)
        if column_axes:
            placement = placement.without_dims([1])
            ids_BT = jax.lax.all_gather(ids_BT, column_axes, axis=0, tiled=True)
        x_BTD = x_BTD + table(ids_BT, placement)
    x_BTD = x_BTD.astype(execution.numerics.activation_dtype)
    if column_axes:
        x_BTD = jax.lax.all_to_all(x_BTD, column_axes, 0, 2, tiled=True)
    return x_BTD
