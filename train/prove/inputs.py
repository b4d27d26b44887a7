"""Make weights and batches that show faults: no zeros, and packed documents."""

import jax
import numpy as np

from data.batch import Batch
from data.config import DataConfig
from data.rows import make_batch
from train.core.program import Program
from train.core.state import TrainState

PADDING_IDS = 3  # The last ids of the vocabulary; the tokenizer lacks them.
_NOISE = 0.05  # the standard deviation of what is added to each initial weight


def perturbed_state(program: Program) -> TrainState:
    """Return initial weights that are neither zero nor equal, and their moments."""
    rng = np.random.default_rng(0)

    def perturb(x: np.ndarray) -> np.ndarray:
        return x + rng.normal(0, _NOISE, x.shape).astype(x.dtype)

    state = jax.device_get(program.init())
    params = jax.tree.map(perturb, state.params)
    moments = jax.device_get(jax.jit(program.optimizer.init)(params))
    return state._replace(params=params, optimizer=moments)


def random_batches(
    data: DataConfig, num_tokens: int, *, count: int, seed: int
) -> list[Batch]:
    """Return global batches of random tokens, with documents of several lengths.

    Ids are below `num_tokens`, and small ones are more frequent than large ones. The
    last row ends with padding.
    """
    rng = np.random.default_rng(seed)
    num_rows = data.batch_size
    length = data.sequence_length
    num_remaining = np.full(num_rows, length + 1)
    num_remaining[-1] = 2 * length // 3
    batches = []
    for _ in range(count):
        uniform = rng.random((num_rows, length + 1))
        tokens = (num_tokens * uniform**2).astype(np.int32)
        is_start = rng.random((num_rows, length + 1)) < 8 / length
        is_start[:, [0, length // 3]] = False, True
        rows, columns = np.nonzero(is_start & data.document_mask)
        batches.append(make_batch(tokens, rows, columns, num_remaining, None))
    return batches
