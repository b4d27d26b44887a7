"""Multi-token prediction: modules that predict tokens further ahead.

Module k (from 1) predicts the token k + 1 positions ahead of position i. Its inputs are
the features of module k - 1 at i (for k = 1, those of the model), and the embedding of
the token k positions ahead. All modules share the model's embedding and head.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2.

Shapes: B batch, T time, D embed, P modules.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.block import Block
from model.block_parts import BlockParts
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.layers import Normalize, stds
from model.linear import Linear
from model.pattern import kinds_of
from model.remat import rematerialized
from model.routing import Routing


class Ahead(NamedTuple):
    """The int32 tokens that prediction modules read, and those that they predict.

    tokens_BTP: for module k, the token k positions ahead; -1 if the document or the row
        ends before it.
    targets_BTP: the target at the position of that token; -1 if there is none.
    """

    tokens_BTP: Int[Array, "B T P"]
    targets_BTP: Int[Array, "B T P"]


def look_ahead(
    inputs_BT: Int[Array, "B T"],
    targets_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"] | None,
    depth: int,
) -> Ahead:
    """Return the tokens that `depth` modules read and predict in whole rows."""

    def shift(x_BT: jax.Array, k: int) -> jax.Array:
        return jnp.pad(x_BT[:, k:], ((0, 0), (0, k)), constant_values=-1)

    tokens, targets = [], []
    for k in range(1, depth + 1):
        tokens_BT, next_targets_BT = shift(inputs_BT, k), shift(targets_BT, k)
        if segment_ids_BT is not None:
            in_document = shift(segment_ids_BT, k) == segment_ids_BT
            tokens_BT = jnp.where(in_document, tokens_BT, -1)
            next_targets_BT = jnp.where(in_document, next_targets_BT, -1)
        tokens.append(tokens_BT)
        targets.append(next_targets_BT)
    return Ahead(jnp.stack(tokens, -1), jnp.stack(targets, -1))


class PredictAhead(nnx.Module):
    """A prediction module: a projection and a block like those of the last layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, parts: BlockParts):
        """Draw the projection and the block."""
        D = config.embed_dim
        make_norm = partial(Normalize, config, config.norm, embed=D)
        self.embedding_norm, self.hidden_norm = make_norm(), make_norm()
        # The axes are those of an MLP's projection back to the residual stream.
        self.projection = Linear(
            "predict_ahead",
            "btf,fd->btd",
            (2 * D, D),
            ("mlp", "embed"),
            std=stds(config, 2 * D)[0],
            bias=False,
            dtype=jnp.dtype(config.param_dtype),
            rngs=rngs,
        )
        self.block = Block(config, kinds_of(config)[-1], rngs, parts)
        self.is_local = config.windows[-1] is not None
        self.first_number = config.num_layers  # Modules are numbered after layers.
        self.norm = make_norm()

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        embedding_BTD: Float[Array, "B T D"],
        execution: Execution,
        call: CallContext,
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Return the normalized features, and the routing of experts."""
        parts = self.embedding_norm(embedding_BTD), self.hidden_norm(x_BTD)
        x_BTD = self.projection(jnp.concatenate(parts, axis=-1), execution, call)
        x_BTD = execution.placement.constrain(x_BTD, "batch", "seq", "embed")
        x_BTD, _, routing = self.block(
            x_BTD, execution, call, cache=None, local_flag=self.is_local
        )
        return self.norm(x_BTD), routing


def run_modules(
    modules: Sequence[PredictAhead],
    x_BTD: Float[Array, "B T D"],
    ahead: Ahead,
    embed: Callable[[Int[Array, "B T"]], Float[Array, "B T D"]],
    execution: Execution,
    call: CallContext,
) -> tuple[list[Float[Array, "B T D"]], Routing | None]:
    """Return the features of each module, and their routing [P] if they have experts.

    `x_BTD` are the model's features, `embed` looks up embeddings of tokens, and `call`
    has the segment ids and rotations of the rows.
    """
    execution = execution._replace(placement=execution.placement.without_stages)
    features, routings = list[jax.Array](), list[Routing]()
    for k, module in enumerate(modules):
        tokens_BT = ahead.tokens_BTP[..., k]
        is_text = tokens_BT >= 0
        if call.segment_ids_BT is not None:
            is_text &= call.segment_ids_BT > 0
        module_call = call.fold_in(module.first_number + k)._replace(
            router_ids_BT=is_text.astype(jnp.int32),
            taps=None,  # Layer statistics cover the model's layers only.
        )
        graph, params = nnx.split(module)

        def run(params, x_BTD, embedding_BTD, graph=graph, call=module_call):
            module = nnx.merge(graph, params)
            return module(x_BTD, embedding_BTD, execution, call)

        run = rematerialized(run, execution.remat, execution.offload, in_loop=False)
        x_BTD, routing = run(params, x_BTD, embed(jnp.maximum(tokens_BT, 0)))
        features.append(x_BTD)
        routings += [] if routing is None else [routing]
    if not routings:
        return features, None
    return features, jax.tree.map(lambda *parts: jnp.stack(parts), *routings)
