"""A GPT, from tokens to logits.

GPT-2, or Llama/Qwen-style, by config. Layers are stacked and run by one `lax.scan`, so
compile time does not grow with depth.

Shapes: B batch, T time, D embed, V vocab, L layers, P rotary pairs, K key/value heads,
H head dim.
"""

import math
from collections.abc import Sequence
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.attention.cache import KeysValues
from model.block import Block
from model.choices import Init, Position
from model.config import ModelConfig
from model.dropout import drop
from model.embedding import Table, look_up
from model.execution import NO_CONTEXT, CallContext, Execution
from model.experts.router import Routing
from model.layers import Normalize, stds
from model.linear import Linear, product
from model.params import Kind, ParamInfo, is_info, param_infos
from model.pipeline import run_pipeline
from model.rope import Rotations, rotations
from model.stacks import depth_of, groups_of, make_stack, run_stacks

_HEAD = "btd,dv->btv"
Cache = tuple[KeysValues, ...]  # [L, B, S, K, H] of layers that one loop runs alike


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

        # The first layers, where those behind them differ: a stack of their own. So are
        # those between layers with experts.
        experts, apart = config.expert_layers, config.layers_before_experts
        between = config.num_layers - apart - experts if experts else 0
        rest = config.num_layers - apart - between

        def stack(depth: int, routed: bool = False) -> Block | None:
            return make_stack(config, depth, routed, rngs) if depth else None

        self.dense_layers, self.layers_between = stack(apart), stack(between)
        self.layers = make_stack(config, rest, experts > 0, rngs)
        self.norm = Normalize(config, config.norm, embed=config.embed_dim)
        self.head = None if config.tied_head else make_head(config, rngs)

    def features(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"] | None,
        execution: Execution,
        cache: Cache | None = None,
        call: CallContext = NO_CONTEXT,
    ) -> tuple[Float[Array, "B T D"], Cache | None, Routing | None]:
        """Run all layers.

        Args:
            tokens_BT: int32 ids.
            positions_BT: int32, from 0 in each document.
            segment_ids_BT: int32 document of each position; None: one a row.
            execution: how the program runs the model.
            cache: the keys and values of earlier positions, for generation.
            call: random keys and taps of this call.

        Returns:
            x_BTD in the activation dtype, the longer cache if one was given, and what
            the routers of those layers did that have experts.
        """
        lookups = [(self.embedding, tokens_BT)]
        if self.positions is not None:
            lookups.append((self.positions, positions_BT))
        x_BTD = look_up(lookups, execution)
        if self.config.scaled_embedding:
            x_BTD = x_BTD * math.sqrt(self.config.embed_dim)
        constrain = execution.placement.constrain
        x_BTD = constrain(x_BTD, "batch", "seq", "embed")
        x_BTD = drop(x_BTD, self.config.dropout.embedding, "embedding", call)
        caches, routing = list[KeysValues](), None
        if execution.placement.stage_axis is not None:
            rows = positions_BT, segment_ids_BT
            for i, (stacks, local, precise) in enumerate(self._loops):
                x_BTD, routing = self._run_stages(
                    stacks,
                    x_BTD,
                    rows,
                    local=local,
                    precise=precise,
                    execution=execution,
                    call=call.fold_in(i),
                )
        else:
            by, unroll = self._rotations(positions_BT), self.config.layer_unroll
            for i, (stacks, local, precise) in enumerate(self._loops):
                stack_caches = None
                if cache is not None:
                    stack_caches = cache[len(caches) :][: sum(groups_of(stacks)[1])]
                x_BTD, longer, routing = run_stacks(
                    stacks,
                    x_BTD,
                    by,
                    segment_ids_BT,
                    execution=execution,
                    call=call.fold_in(i),
                    caches=stack_caches,
                    local=local,
                    precise=precise,
                    unroll=unroll,
                )
                caches += longer or []
        # Otherwise XLA may shard the result of the norm like its scale.
        x_BTD = constrain(self.norm(x_BTD), "batch", "seq", "embed")
        return x_BTD, tuple(caches) if caches else None, routing

    def _run_stages(
        self,
        stacks: list[Block],
        x_BTD: Float[Array, "B T D"],
        rows: tuple[Int[Array, "B T"], Int[Array, "B T"] | None],
        *,
        local: Sequence[bool],
        precise: Sequence[bool],
        execution: Execution,
        call: CallContext,
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Run stacked layers that lie on stages."""
        blocks, params = zip(*map(nnx.split, stacks), strict=True)

        def run(
            params: Any, x_BTD: jax.Array, rows: Any, group: Any, call: CallContext
        ):
            positions_BT, segment_ids_BT = rows
            local_stacks = [
                nnx.merge(block, local_params)
                for block, local_params in zip(blocks, params, strict=True)
            ]
            depth = sum(map(depth_of, local_stacks))
            x, _, routing = run_stacks(
                local_stacks,
                x_BTD,
                self._rotations(positions_BT),
                segment_ids_BT,
                execution=execution,
                call=call,
                caches=None,
                local=local[:depth],  # as in every stage (train/mesh_sizes.py)
                precise=precise,
                unroll=self.config.layer_unroll,
                first=group * depth,
            )
            return x, routing

        return run_pipeline(run, params, x_BTD, rows, execution, call)

    def _rotations(self, positions_BT: Int[Array, "B T"]) -> Rotations | None:
        match self.config.position:
            case Position.rotary:
                return rotations(positions_BT, self.config)
            case Position.learned:
                return None
            case _:
                assert_never(self.config.position)

    @property
    def _loops(self) -> list[tuple[list[Block], list[bool], Sequence[bool]]]:
        """The stacks that each loop over layers runs, in order; local; precise ones."""
        found, apart = [], self.config.layers_before_experts
        local = [window is not None for window in self.config.windows]
        dense = (self.dense_layers,), slice(apart)
        rest = (self.layers_between, self.layers), slice(apart, None)
        for each, own in (dense, rest):
            stacks = [stack for stack in each if stack is not None]
            # One stage's layers of a pipeline: `local` is alike in all, not `precise`.
            depth = sum(map(depth_of, stacks))
            here = local[own][:depth], self.config.precise[own]
            found += [(stacks, *here)] if stacks else []
        return found

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
        """Return a cache with room for `length` positions of `batch` rows.

        first_B: where each row begins; None: at the first of them.
        """
        config, caches = self.config, list[KeysValues]()
        for stacks, *_ in self._loops:
            groups, sizes = groups_of(stacks)
            shape = (groups, batch, length, config.kv_heads, config.head_size)
            zeros = jnp.zeros(shape, execution.numerics.activation_dtype)
            none = jnp.zeros((groups,), jnp.int32)
            first = None if first_B is None else jnp.tile(first_B, (groups, 1))
            caches += [KeysValues(zeros, zeros, none, first)] * sum(sizes)
        return tuple(caches)


def project(
    x_BTD: Float[Array, "B T D"],
    weight: Float[Array, "in out"],
    config: ModelConfig,
    execution: Execution,
) -> Float[Array, "B T V"]:
    """Make float32 logits [B, T, vocab_rows] with a `head_weight`, padding's too."""
    spec = "btd,vd->btv" if config.tied_head else _HEAD
    compute = execution.numerics.compute_dtype
    logits_BTV = product(spec, x_BTD.astype(jnp.float32), weight, compute)
    logits_BTV = execution.placement.constrain(logits_BTV, "batch", "seq", "vocab")
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
    return sum(info.size(shape) for info, shape in _shapes(config))


def num_active_params(config: ModelConfig) -> int:
    """Count the parameters that a token meets: of experts, those it takes."""
    sizes = ((info, info.size(shape)) for info, shape in _shapes(config))
    return sum(size * taken(info, config) // config.num_experts for info, size in sizes)


def taken(info: ParamInfo, config: ModelConfig) -> int:
    """Return how many of `num_experts` parts of a parameter a token meets."""
    apart = info.stack > info.stacked
    return config.experts_per_token if apart else config.num_experts


def _shapes(config: ModelConfig) -> list[tuple[ParamInfo, tuple[int, ...]]]:
    model = abstract_gpt(config)
    infos = jax.tree.leaves(param_infos(model), is_leaf=is_info)
    params = jax.tree.leaves(params_of(model))
    return [(i, p.shape) for i, p in zip(infos, params, strict=True)]
