"""Choose how much of the logits a device computes at once.

The logits [N, V] of N tokens over a large vocabulary do not fit into memory. There are
two ways to divide them:

tiles of tokens: all V logits of n tokens. Each tile reads the head's weight [D, V]
    twice, and reads and writes the weight's float32 gradient. The matrix units wait for
    memory if n is small, and the logits need 4 n V bytes.
pieces of the vocabulary: the logits of all tokens over some of the ids. The weight is
    read twice in all, and each piece of the gradient is complete, so that devices
    scatter it at once. But the exponentials of all logits must be kept until the sums
    of all pieces are known: 2 N V bytes in bfloat16.

Shapes: B batch, T time, N = B T tokens of a device, D embed, V vocab, F mlp.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.config import ModelConfig
from model.execution import Execution
from model.gather import WeightPlacement
from train.core.loss.token_loss import CrossEntropy, TokenLoss, Tokens

_LARGE_VOCAB = 8192  # Logits of this many ids or more are divided.
_TILE = 128  # The positions of a row in the smallest tile, if they divide the row.
_TILE_TOKENS = 4096  # More tokens save little: memory no longer bounds the products.


class LossForm(NamedTuple):
    """How the logits are divided.

    positions: the number of positions of each row in a tile. It divides the row's
        length.
    ids: the number of ids of a piece of the vocabulary. None divides into tiles. A
        loss without gradients is always computed in tiles.
    """

    positions: int
    ids: int | None = None

    def __str__(self) -> str:
        """Describe the form for people."""
        if self.ids is not None:
            return f"all positions and {self.ids:,} ids at once"
        return f"{self.positions:,} positions of each row and all ids at once"


class LossOptions(NamedTuple):
    """What the loss depends on besides arrays.

    axes: the logical axes of the head's weight.
    num_tokens: the number of ids that have a probability; larger ids only pad the
        vocabulary.
    by_row: sum each row separately (`row_sums`).
    """

    form: LossForm
    config: ModelConfig
    execution: Execution
    axes: tuple[str, ...]
    num_tokens: int
    token_loss: TokenLoss = CrossEntropy()
    by_row: bool = False

    @property
    def head_placement(self) -> WeightPlacement:
        """The placement of the head's weight."""
        # train/core/rows.py sums the gradient over replicas, once in a step.
        return self.execution.weight_placement(self.axes)._replace(replica_axes=())

    def gather(self, local_weight: jax.Array) -> jax.Array:
        """Return the head's weight in the compute dtype, gathered over manual axes."""
        compute = self.execution.numerics.compute_dtype
        return self.head_placement.gather(local_weight.astype(compute))

    def sum(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """Sum the loss and the nats of all positions that have a target."""
        nats = tokens.sum(tokens.log_z - tokens.target_logit)
        return self.token_loss.sum(tokens, nats), nats

    def shares(self, counts: jax.Array) -> jax.Array:
        """Return the derivatives of the mean logit by the logits of ids that count."""
        return jnp.where(counts, 1 / self.num_tokens, 0.0)


def choose_form(
    config: ModelConfig, execution: Execution, rows: tuple[int, int], chunk: int | None
) -> LossForm:
    """Return how to divide the logits of a device's rows.

    Args:
        config: the model.
        execution: how the program runs the model.
        rows: B and T of a device in one microbatch.
        chunk: the largest number of positions of a tile. None chooses by memory.
    """
    B, T = rows
    V = config.vocab_size or 0
    if chunk or V < _LARGE_VOCAB:
        return LossForm(largest_divisor(T, chunk or T))
    placement = execution.placement
    D = config.embed_dim
    smallest = largest_divisor(T, _TILE)
    if placement.platform != "tpu":  # Only TPU programs were compared.
        return LossForm(smallest)
    itemsize = execution.numerics.compute_dtype.itemsize
    if placement.scatters_tables and itemsize * B * T <= 4 * D:
        # The exponentials need no more memory than the gradient [D, V] of the tiles,
        # and the logits of a piece less than the float32 gradient of x [N, D].
        return LossForm(smallest, _piece_size(config.vocab_rows, D // 2))
    widths = config.mlp_size + D
    if config.expert_layers:  # A token has a row for each of its experts.
        k = config.experts_per_token
        widths = max(widths, k * (config.expert_size + D))
    # At its peak, a layer's backward pass holds about six arrays of each width.
    layer_bytes = 12 * B * T * widths
    tokens = (layer_bytes / V - 6 * D) / 4  # 6 D V bytes: the weight and its gradient
    positions = int(min(tokens, _TILE_TOKENS)) // B
    return LossForm(max(smallest, largest_divisor(T, max(1, positions))))


def largest_divisor(T: int, limit: int) -> int:
    """Return the largest divisor of T that is at most `limit`."""
    return next(c for c in range(min(limit, T), 0, -1) if T % c == 0)


def _piece_size(V: int, limit: int) -> int:
    """Return the ids of a piece: at most a quarter more than `limit`.

    A multiple of 128 ids fills the lanes of a TPU. The last piece overlaps the one
    before, so the number of pieces is chosen for a small overlap.
    """
    lanes = math.ceil(V / 128)
    fewest = math.ceil(V / limit)
    numbers = range(math.ceil(0.8 * fewest), fewest + 1)
    sizes = [math.ceil(lanes / number) for number in numbers]
    size = min(sizes, key=lambda size: math.ceil(lanes / size) * size)
    return min(V, 128 * size)
