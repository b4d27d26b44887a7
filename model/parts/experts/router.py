"""The router, which chooses each token's experts and computes the balance losses.

Shapes: B batch, T time, k experts of each token, D embed, E experts, L layers.
"""

from typing import NamedTuple, assert_never

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from model.choices import Scores
from model.config import ModelConfig
from model.execution import Execution
from model.layers import stds
from model.params import Kind, ParamInfo
from model.products import expand_to, product
from model.routing import Routing

# Added to a sum of sigmoids that divides. Source: transformers 5.24, deepseek_v3.
_EPSILON = 1e-20
_SCALE = 2.0**33


class Choice(NamedTuple):
    """The int32 experts [B, T, k] of each token and their float32 weights."""

    experts: Int[Array, "B T k"]
    weights: Float[Array, "B T k"]


class Router(nnx.Module):
    """Scores experts for each token, and chooses the best."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Draw the matrix; any biases start at zero."""
        D = config.embed_dim
        E = config.num_experts
        dtype = jnp.dtype(config.param_dtype)
        std, _ = stds(config, D)
        self.config = config
        self.axes = ("embed", "experts")
        weight = std * jax.random.normal(rngs.params(), (D, E), dtype)
        self.weight = nnx.Param(weight, info=ParamInfo(self.axes, Kind.matrix, 1))
        info = ParamInfo(("experts",), Kind.vector)
        is_balanced = config.router_bias_rate > 0
        zeros = jnp.zeros((E,), jnp.float32)
        self.balance = nnx.Param(zeros, info=info) if is_balanced else None
        bias = zeros.astype(dtype)
        self.bias = nnx.Param(bias, info=info) if config.bias else None

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        segment_ids_BT: Int[Array, "B T"] | None,
        execution: Execution,
    ) -> tuple[Choice, Routing]:
        """Return the chosen experts and balance statistics, computed in float32.

        Experts are ranked by score + bias, but their weights are scores without the
        bias. Padding (segment 0) is sent to experts too, but the load and the loss do
        not count it. Without segments every position counts.

        Sources: Switch Transformer, arXiv:2101.03961, section 2.2, for the load
        loss; ST-MoE, arXiv:2202.08906, section 2.2, for the logits' z-loss;
        DeepSeek-V3, arXiv:2412.19437, section 2.1.2, for sigmoid scores, `balance` and
        the loss of each row; DeepSeek-V2, arXiv:2405.04434, section 2.2.2, for groups.
        """
        config = self.config
        E = self.config.num_experts
        x_BTD = x_BTD.astype(jnp.float32)
        with jax.default_matmul_precision("float32"):
            weight = self.weight[...]
            logits_BTE = product(
                "btd,de->bte",
                x_BTD,
                weight,
                jnp.float32,
                placement=execution.weight_placement(self.axes),
            )
        if self.bias is not None:
            logits_BTE = logits_BTE + expand_to(self.bias[...].astype(jnp.float32), 3)
        match config.router:
            case Scores.softmax:
                scores_BTE = jax.nn.softmax(logits_BTE, axis=-1)
            case Scores.sigmoid:
                scores_BTE = jax.nn.sigmoid(logits_BTE)
            case _:
                assert_never(config.router)
        ranked_BTE = jax.lax.stop_gradient(scores_BTE)
        if self.balance is not None:
            bias_E = jax.lax.stop_gradient(self.balance[...]).astype(jnp.float32)
            ranked_BTE = ranked_BTE + bias_E[None, None]
        if config.router_groups > 1:
            ranked_BTE = self._keep_best_groups(ranked_BTE)
        _, experts_BTk = jax.lax.top_k(ranked_BTE, config.experts_per_token)
        chosen_BTkE = experts_BTk[..., None] == jnp.arange(E)[None, None, None]
        # Use a masked sum, because the gradient of a gather would be a scatter.
        weights_BTk = jnp.sum(
            jnp.where(chosen_BTkE, scores_BTE[:, :, None], 0), axis=-1
        )
        if config.router_normalized:
            weights_BTk = self._normalize(weights_BTk)
        if config.routed_scaling != 1:
            weights_BTk = weights_BTk * config.routed_scaling
        routing = self._balance_statistics(
            logits_BTE, scores_BTE, chosen_BTkE, segment_ids_BT, execution
        )
        return Choice(experts_BTk, weights_BTk), routing

    def _keep_best_groups(
        self, ranked_BTE: Float[Array, "B T E"]
    ) -> Float[Array, "B T E"]:
        """Return the scores, with -inf for experts outside the best groups.

        0 would beat the scores of kept experts that have a negative bias.
        """
        config = self.config
        G = config.router_groups
        num_kept = config.router_groups_kept
        grouped_BTGE = ranked_BTE.reshape(*ranked_BTE.shape[:2], G, -1)
        best, _ = jax.lax.top_k(grouped_BTGE, config.router_group_best)
        _, groups_BTk = jax.lax.top_k(jnp.sum(best, axis=-1), num_kept)
        is_kept_BTkG = groups_BTk[..., None] == jnp.arange(G)[None, None, None]
        is_kept_BTG1 = jnp.any(is_kept_BTkG, axis=2)[..., None]
        masked_BTGE = jnp.where(is_kept_BTG1, grouped_BTGE, -jnp.inf)
        return masked_BTGE.reshape(ranked_BTE.shape)

    def _normalize(self, scores: Float[Array, "B T n"]) -> Float[Array, "B T n"]:
        """Divide scores by their sum. If all sigmoids are zero, the result is zero."""
        if self.config.router is Scores.softmax:
            return scores / jnp.sum(scores, axis=-1, keepdims=True)
        # The power of two does not change the result. Without it, the gradient would
        # divide by the square of the epsilon, which is zero in float32.
        scores = scores * _SCALE
        return scores / (jnp.sum(scores, axis=-1, keepdims=True) + _SCALE * _EPSILON)

    def _balance_statistics(
        self,
        logits_BTE: Float[Array, "B T E"],
        scores_BTE: Float[Array, "B T E"],
        chosen_BTkE: Bool[Array, "B T k E"],
        segment_ids_BT: Int[Array, "B T"] | None,
        execution: Execution,
    ) -> Routing:
        """Return each expert's number of tokens, and the sum of the balance losses."""
        config = self.config
        E = self.config.num_experts

        def zero_padding(x: jax.Array) -> jax.Array:
            if segment_ids_BT is None:
                return x
            is_text = jnp.expand_dims(segment_ids_BT > 0, range(2, x.ndim))
            return jnp.where(is_text, x, jnp.zeros((), x.dtype))

        load_E = jnp.sum(zero_padding(chosen_BTkE), axis=(0, 1, 2), dtype=jnp.float32)
        load_E = jax.lax.psum(load_E, execution.placement.layer_batch_axes)
        loss = jnp.zeros((), jnp.float32)
        if config.router_aux_weight:
            relative_load_E = load_E * (E / jnp.maximum(1, jnp.sum(load_E)))
            shares_BTE = self._normalize(scores_BTE)
            aux = jnp.sum(zero_padding(shares_BTE) * relative_load_E[None, None])
            loss = loss + config.router_aux_weight * aux
        if config.router_sequence_aux_weight:
            load_BE = jnp.sum(zero_padding(chosen_BTkE), axis=(1, 2), dtype=jnp.float32)
            load_BE = jax.lax.psum(load_BE, execution.placement.sequence_axes)
            total_B1 = jnp.maximum(1, jnp.sum(load_BE, axis=-1, keepdims=True))
            relative_load_B1E = (load_BE * (E / total_B1))[:, None]
            shares_BTE = self._normalize(scores_BTE)
            aux = jnp.sum(zero_padding(shares_BTE) * relative_load_B1E)
            loss = loss + config.router_sequence_aux_weight * aux
        if config.router_z_weight:
            z_BT1 = jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True)
            z_loss = jnp.sum(zero_padding(jnp.square(z_BT1)))
            loss = loss + config.router_z_weight * z_loss
        return Routing(load_E, loss)
