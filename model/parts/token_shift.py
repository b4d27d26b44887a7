"""Token shift: a layer's input takes channels from the previous position.

A layer then sees pairs of tokens, and needs no parameters for this. Source: the token
shift of RWKV, arXiv:2305.13048, which interpolates with learned weights. Here the first
quarter of the channels is replaced.

Shapes: B batch, T time, D embed, C = D/4 shifted channels.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from model.execution import CallContext, Execution
from model.parts.context.row_pieces import row_pieces


def shift_channels(
    x_BTD: Float[Array, "B T D"],
    last_BC: Float[Array, "B C"] | None,
    execution: Execution,
    call: CallContext,
) -> tuple[Float[Array, "B T D"], Float[Array, "B C"] | None]:
    """Return x with its first D/4 channels from the previous position of the document.

    These channels are zero at a document's first position. To continue cached rows,
    give `last_BC`, those of the position before x, which the second result replaces.
    """
    assert call.positions_BT is not None
    x_BTC, unshifted = jnp.split(x_BTD, [x_BTD.shape[-1] // 4], axis=-1)
    if last_BC is None:
        pieces = row_pieces(execution)
        previous_BTC = pieces.join(pieces.prepend(pieces.split(x_BTC), 1)[:, :-1])
    else:
        previous_BTC = jnp.concatenate([last_BC[:, None], x_BTC[:, :-1]], axis=1)
        last_BC = x_BTC[:, -1]
    previous_BTC = jnp.where(call.positions_BT[..., None] > 0, previous_BTC, 0)
    return jnp.concatenate([previous_BTC, unshifted], axis=-1), last_BC
