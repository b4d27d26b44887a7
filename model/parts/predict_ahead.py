"""Multi-token prediction: modules that predict tokens further ahead.

Module k (from 1) predicts the token k + 1 positions ahead of position i. Its inputs are
the features of module k - 1 at i (for k = 1, those of the model), and the embedding of
the token k positions ahead. All modules share the model's embedding and head.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2.

Shapes: B batch, T time, D embed, P modules.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.block import Block
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.layers import Normalize, stds
from model.linear import Linear
from model.model_parts import ModelParts
from model.pattern import kinds_of
from model.remat import rematerialized
from model.routing import Routing


class PredictAhead(nnx.Module):
    """A prediction module: a projection and a block like those of the last layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, parts: ModelParts):
        """Draw the projection and the block."""
        D = config.embed_dim
        make_norm = partial(Normalize, config, config.norm, embed=D)
        self.embedding_norm = make_norm()
        self.hidden_norm = make_norm()
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


class PredictionModules(nnx.Dict[PredictAhead]):
    """The modules of a model, "0", "1", ...: `ModelParts.prediction_modules`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, parts: ModelParts):
        """Draw the parameters of `config.predict_ahead` modules."""
        super().__init__(
            {
                str(k): PredictAhead(config, rngs, parts)
                for k in range(config.predict_ahead)
            }
        )

    def run(
        self,
        x_BTD: Float[Array, "B T D"],
        tokens_BTP: Int[Array, "B T P"],
        embed: Callable[[Int[Array, "B T"]], Float[Array, "B T D"]],
        execution: Execution,
        call: CallContext,
    ) -> tuple[list[Float[Array, "B T D"]], Routing | None]:
        """Return the features of each module, and the routing [P] of their experts.

        `x_BTD` are the model's features. `tokens_BTP` are, for module k, the tokens k
        positions ahead, or -1 if the document or the row ends before them. `embed`
        looks up embeddings of tokens, and `call` has the segment ids and rotations of
        the rows. The routing is None without experts.
        """
        execution = execution._replace(placement=execution.placement.without_stages)
        features = list[jax.Array]()
        routings = list[Routing]()
        for k, module in enumerate(self.values()):
            tokens_BT = tokens_BTP[..., k]
            is_text = tokens_BT >= 0
            if call.segment_ids_BT is not None:
                is_text &= call.segment_ids_BT > 0
            module_call = call.fold_in(module.first_number + k)._replace(
                router_ids_BT=is_text.astype(jnp.int32),
                taps=None,  # Layer statistics cover the model's layers only.
            )
            graph, params = nnx.split(module)

            def run_module(params, x_BTD, embedding_BTD, graph=graph, call=module_call):
                module = nnx.merge(graph, params)
                return module(x_BTD, embedding_BTD, execution, call)

            run_module = rematerialized(
                run_module, execution.remat, execution.offload, in_loop=False
            )
            x_BTD, routing = run_module(params, x_BTD, embed(jnp.maximum(tokens_BT, 0)))
            features.append(x_BTD)
            routings += [] if routing is None else [routing]
        if not routings:
            return features, None
        return features, jax.tree.map(lambda *parts: jnp.stack(parts), *routings)
