"""Measure how fast batches leave a token store: python -m benchmarks.loader."""

import itertools
import time

from data.batches import train_batches
from data.config import DataConfig
from data.store import Store, prepare


def tokens_per_second(store: Store, config: DataConfig, seconds: float = 3.0) -> float:
    batches = train_batches(store, config, seed=0)
    for _ in itertools.islice(batches, 10):
        pass
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        next(batches)
        count += 1
    elapsed = time.perf_counter() - started
    return count * config.batch_size * config.sequence_length / elapsed


def main() -> None:
    started = time.perf_counter()
    store = prepare(DataConfig())
    print(f"prepare or open: {time.perf_counter() - started:.2f} s")
    for rows, length in ((64, 1024), (12, 64)):
        config = DataConfig(batch_size=rows, sequence_length=length)
        rate = tokens_per_second(store, config)
        print(f"{rows} x {length}: {rate / 1e6:.1f} M tokens/s")


if __name__ == "__main__":
    main()
