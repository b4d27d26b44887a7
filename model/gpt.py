"""A GPT, from tokens to logits.

GPT-2, or Llama/Qwen-style, by config. Layers are stacked and run by one `lax.scan`, so
compile time does not grow with depth.

Shapes: B batch, T time, D embed, V vocab, L layers, P rotary pairs, K key/value heads,
H head dim.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.attention import KeysValues
from model.config import Init, ModelConfig, Position
from model.execution import Execution
from model.gather import Parts, parts_of
from model.layers import Block, Normalize, rotation, stds
from model.linear import Linear, product
from model.params import Kind, ParamInfo, is_info, param_infos
from model.parts import part
from model.remat import rematerialized

_HEAD = "btd,dv->btv"


class Table(nnx.Module):
    """An embedding table, looked up by id."""

    def __init__(
        self,
        config: ModelConfig,
        size: int,
        axis: str,
        std: float,
        rngs: nnx.Rngs,
        padding: int = 0,
    ):
        """Draw the table from N(0, std²); rows that only pad are zero.

        Args:
            config: of the model.
            size: the number of ids.
            axis: their logical axis.
            std: of the initial values.
            rngs: to draw from.
            padding: rows to add behind those of the ids.
        """
        shape, dtype = (size, config.embed_dim), jnp.dtype(config.param_dtype)
        weight = std * jax.random.normal(rngs.params(), shape, dtype)
        self.axes = axis, "embed"
        self.weight = nnx.Param(
            jnp.pad(weight, ((0, padding), (0, 0))) if padding else weight,
            info=ParamInfo(self.axes, Kind.table, padding=padding),
        )

    def __call__(
        self, ids: Int[Array, "*dims"], parts: Parts
    ) -> Float[Array, "*dims D"]:
        """Return the rows of int32 ids; `parts` tells what to gather of the table."""
        with part("embedding"):
            return jnp.take(parts.gather(self.weight[...]), ids, axis=0, mode="clip")


class GPT(nnx.Module):
    """The model. `vocab_size` and, with learned positions, the length must be set."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Draw every parameter."""
        assert config.vocab_size is not None, "settled by train/config"
        self.config = config
        std, size = config.embedding_std, config.vocab_size
        padding = config.vocab_rows - size
        self.embedding = Table(config, size, "vocab", std, rngs, padding)
        learned = config.position is Position.learned
        length = config.max_sequence_length or 0
        assert length or not learned, "settled by train/config"
        self.positions = Table(config, length, "seq", std, rngs) if learned else None

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.layers = stack(rngs)
        self.norm = Normalize(config, config.embed_dim, "embed", config.norm)
        self.head = None if config.tied_head else make_head(config, rngs)

    def features(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"] | None,
        how: Execution,
        cache: KeysValues | None = None,
    ) -> tuple[Float[Array, "B T D"], KeysValues | None]:
        """Run all layers.

        Args:
            tokens_BT: int32 ids.
            positions_BT: int32, from 0 in each document.
            segment_ids_BT: int32 document of each position; None: one a row.
            how: dtypes, kernel, recomputation and placement.
            cache: keys and values [L, B, S, K, H] that came before, for generation.

        Returns:
            x_BTD in the activation dtype, and the longer cache if one was given.
        """
        lookups = [(self.embedding, tokens_BT)]
        if self.positions is not None:
            lookups.append((self.positions, positions_BT))
        x_BTD = how.rules.constrain(look_up(lookups, how), "batch", "seq", "embed")
        by = None
        if self.config.position is Position.rotary:
            by = rotation(positions_BT, self.config)

        block, params = nnx.split(self.layers)

        def layer(x_BTD: Float[Array, "B T D"], params_and_cache):
            params, cache = params_and_cache
            run = nnx.merge(block, params)
            return run(x_BTD, by, segment_ids_BT, how, cache)

        depth, unroll = self.config.num_layers, self.config.layer_unroll
        unroll = depth if unroll == -1 else min(unroll, depth)
        with jax.named_scope("layers"):
            x_BTD, cache = jax.lax.scan(
                rematerialized(layer, how.remat, looped=unroll < depth),
                x_BTD,
                (params, cache),
                unroll=True if unroll == depth else unroll,
            )
        # Else XLA may lay the norm out as its scale lies.
        x_BTD = how.rules.constrain(self.norm(x_BTD), "batch", "seq", "embed")
        return x_BTD, cache

    @property
    def head_weight(self) -> Float[Array, "in out"]:
        """The matrix that makes logits: the embedding's [V, D] if tied, else [D, V].

        V is `vocab_rows` here.
        """
        return self._head.weight[...]

    @property
    def head_axes(self) -> tuple[str, ...]:
        """The logical axes of `head_weight`."""
        return self._head.axes

    @property
    def _head(self) -> Table | Linear:
        return self.embedding if self.head is None else self.head

    def logits(
        self, x_BTD: Float[Array, "B T D"], how: Execution
    ) -> Float[Array, "B T V"]:
        """Project features to float32 [B, T, V] logits, soft-capped if configured."""
        logits_BTV = project(x_BTD, self.head_weight, self.config, how)
        return logits_BTV[..., : self.config.vocab_size]

    def empty_cache(self, batch: int, length: int, how: Execution) -> KeysValues:
        """Return a cache with room for `length` positions of `batch` rows."""
        config = self.config
        shape = (config.num_layers, batch, length, config.kv_heads, config.head_size)
        zeros = jnp.zeros(shape, how.activation_dtype)
        return KeysValues(zeros, zeros, jnp.zeros((config.num_layers,), jnp.int32))


def look_up(
    lookups: Sequence[tuple[Table, Int[Array, "B T"]]], how: Execution
) -> Float[Array, "B T D"]:
    """Add up the rows of tables, in the activation dtype.

    Where a device has only some columns of each row, it looks them up for all devices
    that share the table, and one all-to-all makes x[B_(data, fsdp), T, D] of
    x[B_data, T, D_fsdp]; or else, where that is less, the table is gathered.
    """
    lie = [parts_of(table.axes, how) for table, _ in lookups]  # only gathered
    apart = dict(lie[0].cut).get(1, ()) if how.rules.rows_travel else ()
    x_BTD = jnp.zeros((), jnp.float32)
    for (table, ids_BT), parts in zip(lookups, lie, strict=True):
        if apart:
            parts = parts._replace(cut=tuple(cut for cut in parts.cut if cut[0] != 1))
            ids_BT = jax.lax.all_gather(ids_BT, apart, axis=0, tiled=True)
        x_BTD = x_BTD + table(ids_BT, parts)
    x_BTD = x_BTD.astype(how.activation_dtype)
    if apart:
        x_BTD = jax.lax.all_to_all(x_BTD, apart, 0, 2, tiled=True)
    return x_BTD


def project(
    x_BTD: Float[Array, "B T D"],
    weight: Float[Array, "in out"],
    config: ModelConfig,
    how: Execution,
) -> Float[Array, "B T V"]:
    """Make float32 logits [B, T, vocab_rows] with a `head_weight`, padding's too."""
    spec = "btd,vd->btv" if config.tied_head else _HEAD
    logits_BTV = product(spec, x_BTD.astype(jnp.float32), weight, how.compute_dtype)
    logits_BTV = how.rules.constrain(logits_BTV, "batch", "seq", "vocab")
    cap = config.logit_soft_cap
    return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)


def make_head(config: ModelConfig, rngs: nnx.Rngs) -> Linear:
    """Make the untied projection from features to logits."""
    assert config.vocab_size is not None
    std, _ = stds(config, config.embed_dim)
    return Linear(
        "head",
        _HEAD,
        (config.embed_dim, config.vocab_size),
        ("embed", "vocab"),
        std=0.0 if config.init is Init.zero else std,
        bias=False,
        dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
        kind=Kind.table,
        padding=config.vocab_rows - config.vocab_size,
    )


def abstract_gpt(config: ModelConfig) -> GPT:
    """Build the model without memory: every parameter a `jax.ShapeDtypeStruct`."""
    return nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0)))


def params_of(model: GPT) -> dict[str, Any]:
    """Return the parameters as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def bind(model: GPT, params: dict[str, Any]) -> GPT:
    """Return a copy of a model, abstract or not, that holds these parameters."""
    graph, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def num_params(config: ModelConfig) -> int:
    """Count parameters, without memory; those that only pad do not count."""
    model = abstract_gpt(config)
    infos = jax.tree.leaves(param_infos(model), is_leaf=is_info)
    params = jax.tree.leaves(params_of(model))
    return sum(i.size(p.shape) for i, p in zip(infos, params, strict=True))
