"""One layer: attention, then an MLP or experts.

Shapes: B batch, T time, D embed, F mlp.
"""

from typing import assert_never

from flax import nnx
from jaxtyping import Array, Float, Int

from model.attention.cache import KeysValues
from model.attention.masks import Local
from model.choices import NormPlacement
from model.config import ModelConfig
from model.dropout import drop
from model.execution import CallContext, Execution
from model.experts.experts import Experts
from model.experts.router import Routing
from model.layers import MLP, Normalize, SelfAttention
from model.rope import Rotations
from model.scopes import part_scope


class Block(nnx.Module):
    """Residual block: x + norm(attention(norm x)), then x + norm(mlp(norm x)).

    Of the norms there are those before, the usual ones, or those after, or both.
    """

    def __init__(self, config: ModelConfig, routed: bool, rngs: nnx.Rngs):
        """Make one layer, `routed` to experts or with one MLP."""
        F, self.dropout = config.mlp_size, config.dropout.residual

        match config.norm_placement:
            case NormPlacement.before:
                before, after = True, False
            case NormPlacement.after:
                before, after = False, True
            case NormPlacement.both:
                before, after = True, True
            case _:
                assert_never(config.norm_placement)

        def norm(wanted: bool) -> Normalize | None:
            if not wanted:
                return None
            return Normalize(config, config.norm, embed=config.embed_dim)

        self.attention_norm = norm(before)
        self.attention = SelfAttention(config, rngs)
        self.attention_output_norm = norm(after)
        self.mlp_norm = norm(before)
        self.mlp = Experts(config, rngs) if routed else MLP(config, F, rngs)
        self.mlp_output_norm = norm(after)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        by: Rotations | None,
        segment_ids_BT: Int[Array, "B T"] | None,
        execution: Execution,
        call: CallContext,
        cache: KeysValues | None,
        local: Local | bool,
    ) -> tuple[Float[Array, "B T D"], KeysValues | None, Routing | None]:
        """Run one layer; a local one sees the model's window only."""
        constrain = execution.placement.constrain
        call.note("residual", x_BTD)
        a_BTD = _through(self.attention_norm, x_BTD)
        with part_scope("attention"):
            a_BTD, cache = self.attention(
                a_BTD,
                by,
                segment_ids_BT,
                execution=execution,
                call=call,
                cache=cache,
                local=local,
            )
        call.note("attention", a_BTD)
        a_BTD = _through(self.attention_output_norm, a_BTD)
        a_BTD = drop(a_BTD, self.dropout, "attention_output", call)
        x_BTD = constrain(x_BTD + a_BTD, "batch", "seq", "embed")
        h_BTD, routing = _through(self.mlp_norm, x_BTD), None
        with part_scope("mlp"):
            if isinstance(self.mlp, Experts):
                h_BTD, routing = self.mlp(h_BTD, segment_ids_BT, execution, call)
            else:
                h_BTD = self.mlp(h_BTD, execution, call)
            call.note("mlp", h_BTD)
            h_BTD = _through(self.mlp_output_norm, h_BTD)
            x_BTD = x_BTD + drop(h_BTD, self.dropout, "mlp_output", call)
        return constrain(x_BTD, "batch", "seq", "embed"), cache, routing


def _through(
    norm: Normalize | None, x_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    return x_BTD if norm is None else norm(x_BTD)
