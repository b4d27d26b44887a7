"""Time the way from text to batches: python -m benchmarks.data [--part NAME].

Parts: `tokenize` (files in to a store on disk, against tiktoken's and Hugging Face's
own batch encoders on the same text), `load` (batches of a mixture of packed stores,
against nanoGPT's gather from a memmap and PyTorch's DataLoader), `open` (a reader of a
store of 100 billion tokens). What is compared takes turns; medians are shown.
Hugging Face's and PyTorch's parts run where `tokenizers` and `torch` are installed.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import data.token_store.reader
from data import bpe
from data.batches import Order
from data.config import DataConfig, MixtureSource, Packing, PrepareConfig, Source
from data.errors import DataError
from data.machine import usable_cores
from data.sources import open_sources
from data.token_store.build import prepare_store
from data.tokenizer import load_tokenizer

SHAPES = ((12, 64), (64, 1024), (512, 8192))
REPEATS = 5


def library(num_bytes: int) -> list[str]:
    """Return about num_bytes of Python source, the standard library over and over."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.rglob("*.py"))
    texts = [path.read_text(errors="replace") for path in paths]
    documents, size = [], 0
    for number in itertools.count():
        for text in texts:
            if size >= num_bytes:
                return documents
            documents.append(f"# copy {number}\n{text}" if number else text)
            size += len(documents[-1])
    raise AssertionError


def learn(folder: Path, texts: list[str]) -> tuple[str, str]:
    """Learn a vocabulary of 32,000; return its rank file and the hash."""
    (folder / "learn").mkdir()
    (folder / "learn/text.txt").write_text("\n".join(texts)[: 2**24])
    command = [sys.executable, "-m", "data.train_tokenizer", f"input={folder}/learn"]
    command += [f"output={folder}/ranks.tiktoken", "vocab_size=32000"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    ranks, sha256 = (setting.partition("=")[2] for setting in done.stdout.split())
    return ranks, sha256


def tokenize(folder: Path) -> None:
    """Compare MB/s with all cores."""
    texts = library(100_000_000)
    ranks, sha256 = learn(folder, texts)
    encoding = load_tokenizer(ranks, sha256)
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "text.jsonl").write_text("\n".join(lines))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    cores = usable_cores()

    def ours() -> None:
        given, output = f"{folder}/text.jsonl", f"{folder}/store"
        shutil.rmtree(output, ignore_errors=True)
        prepare_store(
            PrepareConfig(given, output, tokenizer=ranks, tokenizer_sha256=sha256)
        )

    contenders: dict[str, Callable[[], object]] = {
        "data.prepare, files to store": ours,
        "tiktoken, in memory": lambda: encoding.encode_ordinary_batch(
            texts, num_threads=cores
        ),
    }
    try:
        trained = bpe.learn(("\n".join(texts)[: 2**24],), 32000)
        contenders["Hugging Face tokenizers, in memory"] = lambda: (
            trained.encode_batch_fast(texts)
        )
    except DataError:
        print("tokenizers is not installed: not compared")
    times = alternate({name: timed(work) for name, work in contenders.items()}, 3)
    base = times["tiktoken, in memory"]
    print(f"\n| encoding {megabytes:.0f} MB, {cores} cores | MB/s | to tiktoken |")
    print("| --- | --- | --- |")
    for name, seconds in times.items():
        print(f"| {name} | {megabytes / seconds:.1f} | {base / seconds:.2f} |")


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """Return what times a piece of work."""

    def run() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return run


def load(folder: Path) -> None:
    """Compare tokens/s of loaders on warm local stores."""
    texts = library(90_000_000)
    sources = {}
    for number, (name, weight) in enumerate(zip("abc", (0.61, 0.23, 0.16))):  # noqa: B905
        lines = [json.dumps({"text": text}) for text in texts[number::3]]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        given, output = f"{folder}/{name}.jsonl", f"{folder}/{name}"
        prepare_store(PrepareConfig(input=given, output=output))
        sources[name] = MixtureSource(output, weight)
    flat = np.frombuffer("\0".join(texts).encode(), np.uint8).astype(np.uint16)
    flat.tofile(folder / "flat.bin")
    print("\n| M tokens/s | " + " | ".join(f"{b} x {t}" for b, t in SHAPES) + " |")
    print("| --- |" + " --- |" * len(SHAPES))
    rates: dict[str, list[str]] = {}
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
        loaders = {
            "Longhaul, 3 packed sources": Order(
                open_sources(config), config, 0
            ).batches(),
            "the same, not held in memory": from_disk(config),
            "nanoGPT's gather, 1 memmap": gathered(folder / "flat.bin", rows, length),
        }
        if (pytorch := dataloader(folder / "flat.bin", rows, length)) is not None:
            loaders["PyTorch DataLoader, 1 memmap"] = pytorch
        count = max(16, 2**21 // (rows * length))
        work = {name: timer(batches, count) for name, batches in loaders.items()}
        for name, seconds in alternate(work, REPEATS).items():
            rate = count * rows * length / seconds / 1e6
            rates.setdefault(name, []).append(f"{rate:.1f}")
    for name, by_shape in rates.items():
        print(f"| {name} | {' | '.join(by_shape)} |")


def from_disk(config: DataConfig) -> Iterator:
    """Read through TensorStore's cache, as stores of over 1 GiB are."""
    limit = data.token_store.reader.MEMORY_LIMIT_BYTES
    data.token_store.reader.MEMORY_LIMIT_BYTES = 0
    try:
        opened = open_sources(config)
        for store in opened.stores.values():
            store.split("train")
    finally:
        data.token_store.reader.MEMORY_LIMIT_BYTES = limit
    return Order(opened, config, 0).batches()


def timer(batches: Iterator, count: int) -> Callable[[], float]:
    """Return what times `count` batches, after those that were read ahead."""

    def take() -> float:
        for _ in itertools.islice(batches, 8):
            pass
        began = time.perf_counter()
        for _ in itertools.islice(batches, count):
            pass
        return time.perf_counter() - began

    return take


def gathered(path: Path, rows: int, length: int) -> Iterator[tuple]:
    """Gather random rows as nanoGPT's get_batch does, in numpy alone."""
    random = np.random.default_rng(0)
    while True:
        tokens = np.memmap(path, np.uint16, "r")
        starts = random.integers(0, len(tokens) - length, rows)
        inputs = np.stack([tokens[i : i + length].astype(np.int64) for i in starts])
        targets = [tokens[i + 1 : i + 1 + length].astype(np.int64) for i in starts]
        yield inputs, np.stack(targets)


def dataloader(path: Path, rows: int, length: int) -> Iterator | None:
    """Load with PyTorch's DataLoader and no workers; None without PyTorch."""
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
from data.token_store.storage import Storage
import data.batches
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(s for s in lines if s.startswith("VmRSS")).split()[1]) / 1024
before, began = peak(), time.perf_counter()
tokens = TokenArray(Storage(sys.argv[1]), "train", int(sys.argv[2]), int(sys.argv[3]))
rows = Concatenated(tokens, 1024, (len(tokens) - 1) // 1024, True)
order = data.batches._shuffled(len(rows), 0, None)
numbers = np.array([order[i] for i in range(64)])
_, starts = tokens.starts_within(numbers * 1024, numbers * 1024 + 1024)
print(f"{time.perf_counter() - began:.2f} s, {peak() - before:.0f} MB, "
      f"{len(starts)} documents start in 64 rows")
"""


def open_large(folder: Path) -> None:
    """Open 100 billion tokens in 100 million documents; the tokens are not there."""
    import data.token_store.writer as writer
    from data.token_store.storage import Storage

    documents, length = 100_000_000, 1000
    storage = Storage(folder / "large")
    split = writer._SplitWriter(storage, "train", np.dtype("<u2"))
    arrays = split._arrays
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
    given = [str(folder / "large"), str(documents), str(documents * length)]
    done = subprocess.run(
        [sys.executable, "-c", OPEN, *given], check=True, capture_output=True, text=True
    )
    print(f"\nopening 100 billion tokens and the first batch's places: {done.stdout}")


def alternate(work: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each, turn and turn about, after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name in list(work)[:: -1 if turn % 2 else 1]:
            seconds = work[name]()
            if turn:
                times[name].append(seconds)
    return {name: statistics.median(all_s) for name, all_s in times.items()}


def main() -> None:
    """Run the parts."""
    parts = {"tokenize": tokenize, "load": load, "open": open_large}
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
