"""The order in which a source's rows are trained on."""

import hashlib

import numpy as np


def shuffled_rows(ranks: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """Return the row number at each rank of a source's training order; int64 [n].

    The order is an endless sequence of epochs of `num_rows` rows, each shuffled
    differently. The order is that of `MapDataset.shuffle` in grain 0.2.18, which
    takes six times as long for each row.
    """
    # This import is slow. At the first read, it overlaps with the step's compilation.
    from grain.experimental import index_shuffle

    epochs, indices = np.divmod(ranks, num_rows)
    seeds = ((seed + epochs) % 2**32).tolist()
    numbers = [
        index_shuffle(index, num_rows - 1, epoch_seed, 4)
        for index, epoch_seed in zip(indices.tolist(), seeds, strict=True)
    ]
    return np.array(numbers, np.int64)


def seed_of(seed: int, name: str | None) -> int:
    """Return the seed of a source's order. `name` is None for a single source."""
    # The seed of epoch e is this seed plus e. Without the hash, epoch 1 of a run with
    # seed 0 would be the same as epoch 0 of a run with seed 1.
    suffix = "" if name is None else f" of {name}"
    digest = hashlib.sha256(f"order of rows{suffix}, seed {seed}".encode()).digest()
    return int.from_bytes(digest[:4])
