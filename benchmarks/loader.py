"""Time data loaders on local stores: python -m benchmarks.loader [--part NAME].

load    compares a mixture of three packed stores with nanoGPT's gather from a memmap
        and, if PyTorch is installed, with its DataLoader. The loaders alternate. The
        results are medians, and ratios to nanoGPT's gather
open    measures the time and memory to open a store of 100 billion tokens

In `load`, Longhaul reads the stores in four ways: from memory; from disk after every
chunk has been read and checked; from disk for the first time, but with the files in the
page cache; and from disk after the files are evicted from the page cache.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.data import alternate, library
from data.batches import Order
from data.catalog import FORMATS, text_store
from data.config import DataConfig, MixtureSource, Packing, Source
from data.prepare_config import PrepareConfig
from data.sources import open_sources
from data.token_store import reader
from data.token_store.build import prepare_store

SHAPES = ((12, 64), (64, 1024), (512, 8192))
REPEATS = 7
FRESH_ROWS = 2**11  # few enough that most rows are in chunks that are not read yet
NANOGPT = "nanoGPT's gather, 1 memmap"


def stores(folder: Path) -> dict[str, MixtureSource]:
    """Write three stores, and a flat file of the same text; return the mixture."""
    texts = library(90_000_000)
    flat = np.frombuffer("\0".join(texts).encode(), np.uint8).astype(np.uint16)
    flat.tofile(folder / "flat.bin")
    sources = {}
    for number, (name, weight) in enumerate(zip("abc", (0.61, 0.23, 0.16))):  # noqa: B905
        lines = [json.dumps({"text": text}) for text in texts[number::3]]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        source = f"{folder}/{name}.jsonl"
        output = f"{folder}/{name}"
        prepare_store(PrepareConfig(input=source, output=output), FORMATS)
        sources[name] = MixtureSource(output, weight)
    return sources


def load(folder: Path) -> None:
    """Print the tokens per second of each loader for each shape of a batch."""
    sources = stores(folder)
    rates = {}
    for rows, length in SHAPES:
        config = DataConfig(
            name="mixture",
            source=Source.mixture,
            sources=sources,
            sequence_length=length,
            batch_size=rows,
            packing=Packing.best_fit,
            cache_dir=f"{folder}/cache",
        )
        count = min(2**11, max(16, 2**23 // (rows * length)))
        fresh = FRESH_ROWS // rows
        loaders = {
            "Longhaul, 3 packed sources, from memory": loaded(config, 2**30),
            "the same from disk": loaded(config, 0),
            NANOGPT: gathered(folder / "flat.bin", rows, length),
        }
        if (pytorch := dataloader(folder / "flat.bin", rows, length)) is not None:
            loaders["PyTorch DataLoader, 1 memmap"] = pytorch
        work = {name: timer(batches, count) for name, batches in loaders.items()}
        first = "from disk, for the first time"
        cold = "from disk, evicted"
        work[first] = fresh_timer(config, fresh, folder, evicted=False)
        times = alternate(work, REPEATS)  # before any file is evicted
        evicted = {cold: fresh_timer(config, fresh, folder, evicted=True)}
        times |= alternate(evicted, REPEATS)
        for name, seconds in times.items():
            batches = fresh if name.startswith("from disk") else count
            rates.setdefault(name, []).append(batches * rows * length / seconds / 1e6)
    print("\n| M tokens/s | " + " | ".join(f"{b} x {t}" for b, t in SHAPES) + " |")
    print("| --- |" + " --- |" * len(SHAPES))
    for name, by_shape in rates.items():
        cells = [
            f"{rate:.1f} ({rate / base:.2f})"
            for rate, base in zip(by_shape, rates[NANOGPT], strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def loaded(config: DataConfig, limit: int) -> Iterator:
    """Return a batch iterator; splits of up to `limit` bytes are read into memory."""
    with mock.patch.object(reader, "MEMORY_LIMIT_BYTES", limit):
        order = Order(open_sources(config, text_store), config, 0)
    return order.batches()


def fresh_timer(
    config: DataConfig, count: int, folder: Path, evicted: bool
) -> Callable[[], float]:
    """Return a function that opens the stores and times their first `count` batches.

    With `evicted`, the files are removed from the page cache first.
    """

    def take() -> float:
        batches: Any = loaded(config, 0)
        if evicted:
            evict(folder)
        try:
            return timer(batches, count, 0)()
        finally:
            batches.close()

    return take


def evict(folder: Path) -> None:
    """Ask the system to remove the stores in a folder from its page cache."""
    for path in folder.glob("*/train/*/c/*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timer(batches: Iterator, count: int, skipped: int = 8) -> Callable[[], float]:
    """Return a function that times `count` batches in seconds.

    It first takes `skipped` batches, because these may have been read ahead.
    """

    def take() -> float:
        for _ in itertools.islice(batches, skipped):
            pass
        began = time.perf_counter()
        for _ in itertools.islice(batches, count):
            pass
        return time.perf_counter() - began

    return take


def gathered(path: Path, rows: int, length: int) -> Iterator[tuple]:
    """Yield batches of random rows as nanoGPT's get_batch does, but only with NumPy."""
    random = np.random.default_rng(0)
    while True:
        tokens = np.memmap(path, np.uint16, "r")
        starts = random.integers(0, len(tokens) - length, rows)
        inputs = np.stack([tokens[i : i + length].astype(np.int64) for i in starts])
        targets = [tokens[i + 1 : i + 1 + length].astype(np.int64) for i in starts]
        yield inputs, np.stack(targets)


def dataloader(path: Path, rows: int, length: int) -> Iterator | None:
    """Return batches of PyTorch's DataLoader without workers; None without PyTorch."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    tokens = torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int32))

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(tokens) // length - 1

        def __getitem__(self, index: int):
            row = tokens[index * length : index * length + length + 1]
            return row[:-1], row[1:]

    def forever() -> Iterator:
        loader = torch.utils.data.DataLoader(Rows(), rows, shuffle=True, drop_last=True)
        while True:
            yield from loader

    return forever()


OPEN = """
import resource, sys, time
import numpy as np
from data.token_store.reader import TokenArray
from data.rows import Concatenated
from data.key_value_store import KeyValueStore
from data.batches import shuffled_rows
import grain.experimental
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(s for s in lines if s.startswith("VmRSS")).split()[1]) / 1024
before, began = peak(), time.perf_counter()
store = KeyValueStore(sys.argv[1])
tokens = TokenArray(store, "train", int(sys.argv[2]), int(sys.argv[3]))
rows = Concatenated(tokens, 1024, pad=False, document_mask=True, beginning=0)
numbers = shuffled_rows(np.arange(64), len(rows), 0)
_, starts = tokens.starts_within(numbers * 1024, numbers * 1024 + 1024)
print(f"{time.perf_counter() - began:.2f} s, {peak() - before:.0f} MB, "
      f"{len(starts)} documents start in 64 rows")
"""


def open_large(folder: Path) -> None:
    """Open a store whose metadata states 100 billion tokens in 100 million documents.

    The document offsets are written, but no tokens. A new process opens the store.
    """
    import data.token_store.writer as writer
    from data.key_value_store import KeyValueStore

    documents = 100_000_000
    length = 1000
    storage = KeyValueStore(folder / "large")
    split = writer._SplitWriter(storage, "train", np.dtype("<u2"), has_tokens=True)
    arrays = split.arrays
    blocks = np.arange(documents * length // writer.CHUNK_LENGTH + 2)
    starts = -(-blocks * writer.CHUNK_LENGTH // length)
    arrays["index"].append(np.minimum(starts, documents).astype(np.int64))
    for first in range(1, documents + 1, 10**7):
        last = min(first + 10**7, documents + 1)
        arrays["offsets"].append(np.arange(first, last, dtype=np.int64) * length)
    for array in arrays.values():
        array.close()
    for name, size in (("tokens", documents * length), ("id_offsets", documents + 1)):
        file = folder / "large/train" / name / "zarr.json"
        metadata = json.loads(file.read_text())
        metadata["shape"] = [size]
        file.write_text(json.dumps(metadata))
    args = [str(folder / "large"), str(documents), str(documents * length)]
    completed = subprocess.run(
        [sys.executable, "-c", OPEN, *args], check=True, capture_output=True, text=True
    )
    print(
        f"\nopening 100 billion tokens and the first batch's places: {completed.stdout}"
    )


def main() -> None:
    """Run the chosen part, or both."""
    parts = {"load": load, "open": open_large}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=parts)
    chosen = parser.parse_args().part
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    for name, part in parts.items():
        if chosen in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                part(Path(folder))


if __name__ == "__main__":
    main()
