"""Next-token cross-entropy in float32, logits existing a tile at a time when large.

Shapes: B batch, T time, C positions of a tile, D embed, V vocab.
"""

import jax
import jax.numpy as jnp

from data.batches import Batch
from model.gpt import GPT
from model.layers import Execution

_LARGE_VOCAB = 8192  # from here on logits are tiled unless the config says otherwise
_TILE = 128


def loss_sum(
    model: GPT, batch: Batch, how: Execution, z_loss: float, chunk: int | None
) -> tuple[jax.Array, jax.Array]:
    """Sum the loss over a batch's targets; those that are negative do not count.

    Args:
        model: with its parameters bound.
        batch: int32 [B, T] fields.
        how: execution.
        z_loss: weight of log²Z, which keeps logits from drifting (PaLM, section 5).
        chunk: positions C of a row whose logits exist at once; None: all of a row's
            with a small vocabulary, else about 128.

    Returns:
        float32 scalars: what to minimize, and the cross-entropy in nats alone.
    """
    x_BTD, _ = model.features(batch.inputs, batch.positions, batch.segment_ids, how)
    T = x_BTD.shape[1]
    V = model.config.vocab_size or 0
    C = tile(T, V, chunk)
    if C == T:
        return _tile_loss(model, x_BTD, batch.targets, how, z_loss)

    def tiles(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [T/C, B, C, ...]
        return jnp.moveaxis(x.reshape(x.shape[0], T // C, C, *x.shape[2:]), 1, 0)

    @jax.checkpoint  # the backward pass makes a tile's logits again
    def add(total, tile):
        x_BCD, targets_BC = tile
        part = _tile_loss(model, x_BCD, targets_BC, how, z_loss)
        return jax.tree.map(jnp.add, total, part), None

    zero = jnp.zeros((), jnp.float32)
    with jax.named_scope("loss"):
        return jax.lax.scan(add, (zero, zero), (tiles(x_BTD), tiles(batch.targets)))[0]


def tile(T: int, V: int, chunk: int | None) -> int:
    """Settle C: a divisor of T, at most `chunk`."""
    most = chunk or (_TILE if V >= _LARGE_VOCAB else T)
    return next(c for c in range(min(most, T), 0, -1) if T % c == 0)


def _tile_loss(
    model: GPT, x_BCD: jax.Array, targets_BC: jax.Array, how: Execution, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    logits_BCV = model.logits(x_BCD, how)
    log_z_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    # A masked sum instead of a gather: with the vocabulary sharded each device adds up
    # its part, and no logits travel.
    V = logits_BCV.shape[-1]
    is_target_BCV = jnp.arange(V) == targets_BC[..., None]
    target_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0.0), axis=-1)
    counts = targets_BC >= 0
    nats = jnp.sum(jnp.where(counts, log_z_BC - target_BC, 0.0))
    z = jnp.sum(jnp.where(counts, jnp.square(log_z_BC), 0.0))
    return nats + z_loss * z, nats
