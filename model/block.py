"""One layer, attention and then an MLP or experts; and a stack of them, run by a scan.

Shapes: B batch, T time, D embed, F mlp, L layers.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.attention.cache import KeysValues
from model.attention.xla import Local
from model.choices import NormPlacement
from model.config import ModelConfig
from model.dropout import drop
from model.execution import Execution
from model.experts import Experts
from model.layers import MLP, Normalize, SelfAttention
from model.parts import part
from model.remat import layer_input, rematerialized
from model.rope import Rotations
from model.router import Routing
from model.taps import Taps


class Block(nnx.Module):
    """Residual block: x + norm(attention(norm x)), then x + norm(mlp(norm x)).

    Of the norms there are those before, the usual ones, or those after, or both.
    """

    def __init__(self, config: ModelConfig, routed: bool, rngs: nnx.Rngs):
        """Make one layer, `routed` to experts or with one MLP."""
        F, self.dropout = config.mlp_size, config.dropout.residual

        def norm(*places: NormPlacement) -> Normalize | None:
            if config.norm_placement not in places:
                return None
            return Normalize(config, config.norm, embed=config.embed_dim)

        before = NormPlacement.before, NormPlacement.both
        after = NormPlacement.after, NormPlacement.both
        self.attention_norm = norm(*before)
        self.attention = SelfAttention(config, rngs)
        self.attention_output_norm = norm(*after)
        self.mlp_norm = norm(*before)
        self.mlp = Experts(config, rngs) if routed else MLP(config, F, rngs)
        self.mlp_output_norm = norm(*after)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        by: Rotations | None,
        segment_ids_BT: Int[Array, "B T"] | None,
        how: Execution,
        cache: KeysValues | None,
        local: Local | bool,
    ) -> tuple[Float[Array, "B T D"], KeysValues | None, Routing | None]:
        """Run one layer; a local one sees the model's window only."""
        how.note("residual", x_BTD)
        a_BTD = _through(self.attention_norm, x_BTD)
        with part("attention"):
            a_BTD, cache = self.attention(a_BTD, by, segment_ids_BT, how, cache, local)
        how.note("attention", a_BTD)
        a_BTD = _through(self.attention_output_norm, a_BTD)
        a_BTD = drop(a_BTD, self.dropout, "attention_output", how)
        x_BTD = how.rules.constrain(x_BTD + a_BTD, "batch", "seq", "embed")
        h_BTD, routing = _through(self.mlp_norm, x_BTD), None
        with part("mlp"):
            if isinstance(self.mlp, Experts):
                h_BTD, routing = self.mlp(h_BTD, how)
            else:
                h_BTD = self.mlp(h_BTD, how)
            how.note("mlp", h_BTD)
            h_BTD = _through(self.mlp_output_norm, h_BTD)
            x_BTD = x_BTD + drop(h_BTD, self.dropout, "mlp_output", how)
        return how.rules.constrain(x_BTD, "batch", "seq", "embed"), cache, routing


def _through(
    norm: Normalize | None, x_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    return x_BTD if norm is None else norm(x_BTD)


def make_stack(config: ModelConfig, depth: int, routed: bool, rngs: nnx.Rngs) -> Block:
    """Make layers of one kind, their parameters stacked."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> Block:
        return Block(config, routed, rngs)

    return stack(rngs)


def depth_of(stack: Block) -> int:
    """Return how many layers are stacked."""
    return stack.attention.query.weight.shape[0]


def run_stack(
    stack: Block,
    x_BTD: Float[Array, "B T D"],
    by: Rotations | None,
    segment_ids_BT: Int[Array, "B T"] | None,
    how: Execution,
    cache: KeysValues | None,
    local: Sequence[bool],
    unroll: int,
    first: jax.Array | int = 0,
) -> tuple[Float[Array, "B T D"], KeysValues | None, Routing | None]:
    """Run stacked layers, `unroll` in each iteration of a loop; -1: without one.

    Which of them are local the loop is told layer by layer, if not all are alike. The
    first has that number among all layers of its kind, for what is drawn at random.
    """
    block, params = nnx.split(stack)
    flags_L = jnp.asarray(local) if len({*local}) > 1 else None

    def layer(x_BTD: Float[Array, "B T D"], of_layer):
        number, params, cache, flag = of_layer
        own = how if number is None else how.drawing(number)
        here = local[0] if flag is None else Local(flag, sum(local), len(local))
        taps = None if how.taps is None else Taps()
        own = own._replace(taps=taps)
        x_BTD = layer_input(x_BTD)
        run = nnx.merge(block, params)
        x_BTD, *rest = run(x_BTD, by, segment_ids_BT, own, cache, here)
        return x_BTD, (*rest, taps and taps.of_layer())

    depth = depth_of(stack)
    numbers = None if how.keys_BT is None else first + jnp.arange(depth)
    unroll = depth if unroll == -1 else min(unroll, depth)
    with jax.named_scope("layers"):
        x_BTD, (cache, routing, noted) = jax.lax.scan(
            rematerialized(layer, how.remat, how.offload, looped=unroll < depth),
            x_BTD,
            (numbers, params, cache, flags_L),
            unroll=True if unroll == depth else unroll,
        )
    if how.taps is not None and noted is not None:
        how.taps.put(noted)
    return x_BTD, cache, routing
