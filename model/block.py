"""One layer: a mixer, such as attention, then an MLP or experts.

Shapes: B batch, T time, D embed, F mlp.
"""

from typing import assert_never

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from model.attention.cache import LayerCache
from model.choices import NormPlacement
from model.config import ModelConfig
from model.dropout import drop
from model.execution import CallContext, Execution
from model.layers import Normalize
from model.model_parts import ModelParts
from model.pattern import BlockKind
from model.routing import Routing
from model.scopes import part_scope


class Block(nnx.Module):
    """A residual block: x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).

    `config.norm_placement` says which of these norms exist.
    """

    def __init__(
        self, config: ModelConfig, kind: BlockKind, rngs: nnx.Rngs, parts: ModelParts
    ):
        """Draw the parameters of one layer."""
        self.dropout = config.dropout.residual
        self.token_shift = config.token_shift
        self.shift_dim = config.embed_dim // 4
        self.shift = parts.shift
        match config.norm_placement:
            case NormPlacement.before:
                norm_inputs = True
                norm_outputs = False
            case NormPlacement.after:
                norm_inputs = False
                norm_outputs = True
            case NormPlacement.both:
                norm_inputs = True
                norm_outputs = True
            case _:
                assert_never(config.norm_placement)

        def norm_if(exists: bool) -> Normalize | None:
            if not exists:
                return None
            return Normalize(config, config.norm, embed=config.embed_dim)

        self.attention_norm = norm_if(norm_inputs)
        self.attention = parts.mixers[kind.mixer].make(config, rngs)
        self.attention_output_norm = norm_if(norm_outputs)
        self.mlp_norm = norm_if(norm_inputs)
        self.has_experts = kind.experts
        make_mlp = parts.experts if kind.experts else parts.mlp
        self.mlp = make_mlp(config, rngs)
        self.mlp_output_norm = norm_if(norm_outputs)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        execution: Execution,
        call: CallContext,
        cache: LayerCache | None,
        local_flag: Array | bool,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, Routing | None]:
        """Return the layer's output, the updated cache, and the routing of experts.

        `local_flag` says whether a query sees only the window (a local layer).
        """
        constrain = execution.placement.constrain
        mixer_cache, last_a, last_h = cache or (None, None, None)
        call.note("residual", x_BTD)
        x_BTD, a_BTD = _keep_and_normalize(self.attention_norm, x_BTD, execution)
        with part_scope("attention"):
            if self.token_shift.in_attention:
                a_BTD, last_a = self.shift(a_BTD, last_a, execution, call)
            a_BTD, mixer_cache = self.attention(
                a_BTD, execution, call, mixer_cache, local_flag
            )
        call.note("attention", a_BTD)
        a_BTD = _normalize(self.attention_output_norm, a_BTD)
        a_BTD = drop(a_BTD, self.dropout, "attention_output", call)
        x_BTD = constrain(x_BTD + a_BTD, "batch", "seq", "embed")
        x_BTD, h_BTD = _keep_and_normalize(self.mlp_norm, x_BTD, execution)
        routing = None
        with part_scope("mlp"):
            if self.token_shift.in_mlp:
                h_BTD, last_h = self.shift(h_BTD, last_h, execution, call)
            if self.has_experts:
                ids_BT = call.router_ids_BT
                ids_BT = call.segment_ids_BT if ids_BT is None else ids_BT
                h_BTD, routing = self.mlp(h_BTD, ids_BT, execution, call)
            else:
                h_BTD = self.mlp(h_BTD, execution, call)
            call.note("mlp", h_BTD)
            h_BTD = _normalize(self.mlp_output_norm, h_BTD)
            x_BTD = x_BTD + drop(h_BTD, self.dropout, "mlp_output", call)
        if mixer_cache is not None:
            cache = LayerCache(mixer_cache, last_a, last_h)
        return constrain(x_BTD, "batch", "seq", "embed"), cache, routing

    def empty_cache(
        self, batch: int, length: int, dtype: DTypeLike, first_B: Array | None
    ) -> LayerCache:
        """Return an empty cache for `length` positions of `batch` rows."""
        zeros = jnp.zeros((batch, self.shift_dim), dtype)
        shift = self.token_shift
        return LayerCache(
            self.attention.empty_cache(batch, length, dtype, first_B),
            attention_input=zeros if shift.in_attention else None,
            mlp_input=zeros if shift.in_mlp else None,
        )


def _keep_and_normalize(
    norm: Normalize | None, x_BTD: Float[Array, "B T D"], execution: Execution
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    return (x_BTD, x_BTD) if norm is None else norm.keep_input(x_BTD, execution)


def _normalize(
    norm: Normalize | None, x_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    return x_BTD if norm is None else norm(x_BTD)
