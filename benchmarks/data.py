"""Time the preparation of a token store from a text file: python -m benchmarks.data.

The baselines are the batch encoders of tiktoken and, if `tokenizers` is installed, of
Hugging Face, which encode the same text in memory. All three alternate, and the results
are medians. benchmarks/loader.py times the reading of stores.
"""

import importlib
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
from collections.abc import Callable
from pathlib import Path

from data import bpe
from data.catalog import FORMATS
from data.errors import DataError
from data.machine import usable_cores
from data.prepare_config import PrepareConfig
from data.token_store.build import prepare_store
from data.tokenizer import load_tokenizer, tokenizer_from_bytes
from data.tokenizer_json import tokenizer_json


def library(num_bytes: int) -> list[str]:
    """Return texts of about `num_bytes`: copies of the standard library's source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.rglob("*.py"))
    texts = [path.read_text(errors="replace") for path in paths]
    documents = []
    size = 0
    for number in itertools.count():
        for text in texts:
            if size >= num_bytes:
                return documents
            documents.append(f"# copy {number}\n{text}" if number else text)
            size += len(documents[-1])
    raise AssertionError


def learn(folder: Path, texts: list[str]) -> tuple[str, str]:
    """Learn a vocabulary of 32,000 tokens; return its rank file and SHA-256 hash."""
    (folder / "learn").mkdir()
    (folder / "learn/text.txt").write_text("\n".join(texts)[: 2**24])
    command = [sys.executable, "-m", "data.train_tokenizer", f"input={folder}/learn"]
    command += [f"output={folder}/ranks.tiktoken", "vocab_size=32000"]
    completed = subprocess.run(command, check=True, capture_output=True, text=True)
    ranks, sha256 = (setting.partition("=")[2] for setting in completed.stdout.split())
    return ranks, sha256


def tokenize(folder: Path) -> None:
    """Print the MB/s of each tokenizer on all cores."""
    texts = library(100_000_000)
    ranks, sha256 = learn(folder, texts)
    encoding = load_tokenizer(ranks, sha256)
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "text.jsonl").write_text("\n".join(lines))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    cores = usable_cores()

    def ours() -> None:
        source = f"{folder}/text.jsonl"
        output = f"{folder}/store"
        shutil.rmtree(output, ignore_errors=True)
        prepare_store(
            PrepareConfig(source, output, tokenizer=ranks, tokenizer_sha256=sha256),
            FORMATS,
        )

    contenders: dict[str, Callable[[], object]] = {
        "data.prepare, files to store": ours,
        "tiktoken, in memory": lambda: encoding.encode_ordinary_batch(
            texts, num_threads=cores
        ),
    }
    try:
        content = bpe.train(("\n".join(texts)[: 2**24],), 32000)
        learned = json.dumps(tokenizer_json(tokenizer_from_bytes("learned", content)))
        trained = importlib.import_module("tokenizers").Tokenizer.from_str(learned)
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
    """Return a function that does the work and returns its duration in seconds."""

    def run() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return run


def alternate(work: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Run the timers alternately; return the median seconds of each.

    A first round warms up and is not counted. Every second round has the reverse order.
    """
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name in list(work)[:: -1 if turn % 2 else 1]:
            seconds = work[name]()
            if turn:
                times[name].append(seconds)
    return {name: statistics.median(all_s) for name, all_s in times.items()}


def main() -> None:
    """Compare the tokenizers in a temporary folder, and print a table."""
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        tokenize(Path(folder))


if __name__ == "__main__":
    main()
