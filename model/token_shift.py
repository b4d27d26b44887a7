"""Token shift: a layer's input takes channels from the previous position.

A layer then sees pairs of tokens without a parameter. Source: the token shift of RWKV,
arXiv:2305.13048, which interpolates with learned weights. Here the first quarter of the
channels is replaced.

Shapes: B batch, T time, D embed, C = D/4 shifted channels.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from model.execution import CallContext, Execution
from model.row_pieces import row_pieces


def shift_channels(
    x_BTD: Float[Array, "B T D"],
    last_BC: Float[Array, "B C"] | None,
    execution: Execution,
    call: CallContext,
) -> tuple[Float[Array, "B T D"], Float[Array, "B C"] | None]:
    """Return x with its first D/4 channels from the previous position of the document.

    These channels are zero at a document's first position. `last_BC` are those of the
    position before x, if x continues cached rows. The second result replaces them.
    """
    assert call.positions_BT is not None
    x_BTC, unshifted = jnp.split(x_BTD, [x_BTD.shape[-1] // 4], axis=-1)
    if last_BC is None:
        pieces = row_pieces(execution)
        previous = pieces.join(pieces.prepend(pieces.split(x_BTC), 1)[:, :-1])
    else:
        previous = jnp.concatenate([last_BC[:, None], x_BTC[:, :-1]], axis=1)
        last_BC = x_BTC[:, -1]
    previous = jnp.where(call.positions_BT[..., None] > 0, previous, 0)
    return jnp.concatenate([previous, unshifted], axis=-1), last_BC
