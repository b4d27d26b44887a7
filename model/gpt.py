"""A GPT, from tokens to logits.

The config selects an architecture like GPT-2, or like Llama and Qwen. The parameters
of layers are stacked, and one `lax.scan` runs the layers of a segment, so compile time
does not grow with depth (model/pattern.py, model/segments.py).

Shapes: B batch, T time, D embed, V vocab, K key/value heads, H head dim.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.attention.cache import LayerCache
from model.block import Block
from model.choices import Position
from model.config import ModelConfig
from model.dropout import drop
from model.embedding import Table, look_up
from model.execution import NO_CONTEXT, CallContext, Execution
from model.head import make_head, project
from model.layers import Normalize
from model.linear import Linear
from model.model_parts import ModelParts
from model.params import layer_trees
from model.pattern import Segment, segments_of
from model.rope import Rotations, make_rotations
from model.routing import Routing
from model.segments import (
    LayerFlags,
    draw_layer_keys,
    make_segment,
    num_repeats,
    run_segment,
)

# A cache, of arrays [repeats, ...], for each slot of each segment.
Cache = tuple[LayerCache, ...]


class GPT(nnx.Module):
    """The model. Its config must set `vocab_size`.

    If positions are learned, the config must also set `max_sequence_length`.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, parts: ModelParts):
        """Draw every parameter."""
        assert config.vocab_size is not None, "`settle` sets it (train/resolve)"
        self.config = config
        std = config.embedding_std
        size = config.vocab_size
        padding = config.vocab_rows - size
        self.embedding = Table(config, size, "vocab", std, rngs, padding=padding)
        learned = config.position is Position.learned
        length = config.max_sequence_length or 0
        assert length or not learned, "`settle` sets it (train/resolve)"
        self.positions = Table(config, length, "seq", std, rngs) if learned else None

        keys_L = draw_layer_keys(config, rngs)
        segments = (make_segment(config, s, keys_L, parts) for s in segments_of(config))
        self.layers = nnx.Dict({str(i): nnx.Dict(s) for i, s in enumerate(segments)})
        self.norm = Normalize(config, config.norm, embed=config.embed_dim)
        self.head = None if config.tied_head else make_head(config, rngs)
        has_modules = config.predict_ahead > 0
        self.predict_ahead = (
            parts.prediction_modules(config, rngs, parts) if has_modules else None
        )

    def features(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"] | None,
        execution: Execution,
        cache: Cache | None = None,
        call: CallContext = NO_CONTEXT,
    ) -> tuple[Float[Array, "B T D"], Cache | None, Routing | None]:
        """Return the features after the final norm, in the activation dtype.

        Also return the updated cache if a cache is given, and the routing of the layers
        that have experts. Positions count from 0 in each document.
        """
        lookups = [(self.embedding, tokens_BT)]
        if self.positions is not None:
            lookups.append((self.positions, positions_BT))
        x_BTD = self._embed(lookups, execution)
        x_BTD = drop(x_BTD, self.config.dropout.embedding, "embedding", call)
        is_pipelined = execution.placement.stage_axis is not None
        call = call._replace(
            segment_ids_BT=segment_ids_BT,
            positions_BT=positions_BT,
            rotations=None if is_pipelined else self._rotations(positions_BT),
        )
        updated_caches = list[LayerCache]()
        routings = list[Routing]()
        for number, (segment, blocks) in enumerate(self._segments):
            segment_call = call.fold_in(number)
            caches = None
            if is_pipelined:
                x_BTD, routing = self._run_stages(
                    segment, blocks, x_BTD, positions_BT, execution, call=segment_call
                )
            else:
                if cache is not None:
                    caches = cache[len(updated_caches) :][: len(blocks)]
                x_BTD, caches, routing = run_segment(
                    blocks,
                    x_BTD,
                    execution,
                    segment_call,
                    flags=self._flags(segment),
                    unroll=execution.layer_unroll,
                    caches=caches,
                )
            updated_caches += caches or []
            routings += [] if routing is None else [routing]
        routing = None
        if routings:
            routing = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routings)
        # Without a constraint, XLA may shard the norm's result like the norm's scale.
        constrain = execution.placement.constrain
        x_BTD = constrain(self.norm(x_BTD), "batch", "seq", "embed")
        return x_BTD, tuple(updated_caches) or None, routing

    def features_ahead(
        self,
        x_BTD: Float[Array, "B T D"],
        tokens_BTP: Int[Array, "B T P"],
        positions_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"] | None,
        execution: Execution,
        call: CallContext = NO_CONTEXT,
    ) -> tuple[list[Float[Array, "B T D"]], Routing | None]:
        """Return the features of each of P prediction modules, given the model's.

        Module k reads `tokens_BTP[..., k - 1]`, the tokens k positions ahead, or -1.
        Also return the routing [P] of the modules if they have experts. The features of
        a position are undefined if the document ends before the token that its module
        reads. Routers do not count these positions.
        """
        call = call._replace(
            segment_ids_BT=segment_ids_BT,
            positions_BT=positions_BT,
            rotations=self._rotations(positions_BT),
        )

        def embed(tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
            return self._embed([(self.embedding, tokens_BT)], execution)

        assert self.predict_ahead is not None
        return self.predict_ahead.run(x_BTD, tokens_BTP, embed, execution, call)

    def _embed(
        self, lookups: list[tuple[Table, jax.Array]], execution: Execution
    ) -> Float[Array, "B T D"]:
        x_BTD = look_up(lookups, execution)
        if self.config.scaled_embedding:
            x_BTD = x_BTD * math.sqrt(self.config.embed_dim)
        return execution.placement.constrain(x_BTD, "batch", "seq", "embed")

    def _run_stages(
        self,
        segment: Segment,
        blocks: list[Block],
        x_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        execution: Execution,
        *,
        call: CallContext,
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Run a segment whose layers are sharded over the stages of a pipeline."""
        graphs, params = zip(*map(nnx.split, blocks), strict=True)
        flags = self._flags(segment)

        def run(params, x_BTD, positions_BT, group_number, call: CallContext):
            stage_blocks = list(map(nnx.merge, graphs, params))
            depth = len(stage_blocks) * num_repeats(stage_blocks)
            x_BTD, _, routing = run_segment(
                stage_blocks,
                x_BTD,
                execution,
                call._replace(
                    positions_BT=positions_BT, rotations=self._rotations(positions_BT)
                ),
                # Every group of layers has the same local flags
                # (train/resolve/mesh_sizes.py).
                flags=flags._replace(local=flags.local[:depth]),
                unroll=execution.layer_unroll,
                first_layer=group_number * depth,
            )
            return x_BTD, routing

        pipeline = execution.pipeline
        assert pipeline is not None
        return pipeline.run(run, params, x_BTD, positions_BT, execution, call=call)

    def _rotations(self, positions_BT: Int[Array, "B T"]) -> Rotations | None:
        rotary = self.config.position is Position.rotary
        return make_rotations(positions_BT, self.config) if rotary else None

    @property
    def _segments(self) -> list[tuple[Segment, list[Block]]]:
        """Each segment, with the stacked block of each slot."""
        blocks = layer_trees(self.layers)
        return list(zip(segments_of(self.config), blocks, strict=True))

    def _flags(self, segment: Segment) -> LayerFlags:
        layers = slice(segment.first, segment.first + segment.num_layers)
        local_flags = [window is not None for window in self.config.windows]
        return LayerFlags(local_flags[layers], self.config.high_precision_flags[layers])

    @property
    def head_weight(self) -> Float[Array, "in out"]:
        """The weight of the head: [D, vocab_rows], or [vocab_rows, D] if tied."""
        return self._head.weight[...]

    @property
    def head_axes(self) -> tuple[str, ...]:
        """The logical axes of `head_weight`."""
        return self._head.axes

    @property
    def _head(self) -> Table | Linear:
        return self.embedding if self.head is None else self.head

    def logits(
        self, x_BTD: Float[Array, "B T D"], execution: Execution
    ) -> Float[Array, "B T V"]:
        """Project features to float32 [B, T, V] logits, soft-capped if configured."""
        logits_BTV = project(x_BTD, self.head_weight, self.config, execution)
        return logits_BTV[..., : self.config.vocab_size]

    def empty_cache(
        self,
        batch: int,
        length: int,
        execution: Execution,
        first_B: Int[Array, "B"] | None = None,
    ) -> Cache:
        """Return an empty cache for `length` positions of `batch` rows.

        Row i begins at position first_B[i], or at 0 if first_B is None.
        """
        caches = list[LayerCache]()
        dtype = execution.numerics.activation_dtype
        for segment, blocks in self._segments:
            for block in blocks:
                cache = block.empty_cache(batch, length, dtype, first_B)
                caches.append(jax.tree.map(partial(_repeat, segment.repeats), cache))
        return tuple(caches)


def _repeat(times: int, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, (times, *x.shape))


def abstract_gpt(config: ModelConfig, parts: ModelParts) -> GPT:
    """Return the model with `jax.ShapeDtypeStruct` parameters."""
    return nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0), parts))


def params_of(model: GPT) -> dict[str, Any]:
    """Return the parameters as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def bind(model: GPT, params: dict[str, Any]) -> GPT:
    """Return a copy of the model, which may be abstract, with these parameters."""
    graph, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
