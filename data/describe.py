"""Describe in words what a store or a batch contains."""

from collections.abc import Iterator

import numpy as np

from data.encoding import decode
from data.excerpts import Excerpt, document_id
from data.splits import SPLITS, Split
from data.token_store.layout import SKIPPED
from data.token_store.store import Store

_BAR_LENGTH = 40  # in characters


def describe_store(store: Store) -> str:
    """Return a store's identity and counts as lines of text."""
    manifest = store.manifest
    lines = [
        f"store        {store.path}",
        f"fingerprint  {store.fingerprint}",
        f"tokenizer    {manifest['tokenizer']}, {store.encoding.n_vocab:,} ids",
        f"source       {manifest['source']['path']}",
    ]
    for split in SPLITS:
        counts = manifest["splits"][split]
        per_token = counts["bytes"] / max(1, counts["tokens"])
        lines.append(
            f"{split:<11}  {counts['documents']:,} documents, {counts['tokens']:,} "
            f"tokens, {counts['bytes']:,} bytes, {per_token:.2f} bytes a token"
        )
    if count := manifest["empty_documents"]:
        lines.append(f"empty        {count:,} documents, left out")
    if count := manifest["skipped_records"]:
        file = f"{store.path}/{SKIPPED}"
        lines.append(f"skipped      {count:,} bad records, listed in {file}")
    return "\n".join(lines)


def describe_lengths(store: Store, split: Split) -> str:
    """Return a histogram of document lengths, by powers of two, as lines of text."""
    counts = np.zeros(64, np.int64)
    last_offset = np.zeros(0, np.int64)
    for offsets in store.split(split).iterate_shards("offsets"):
        lengths = np.diff(np.concatenate([last_offset, offsets]))
        counts += np.bincount(np.log2(np.maximum(lengths, 1)).astype(int), minlength=64)
        last_offset = offsets[-1:]
    powers = np.flatnonzero(counts).tolist()
    if not powers:
        return f"{split}: no documents"
    lines = [f"{split}: documents by length in tokens"]
    for power in range(powers[0], powers[-1] + 1):
        bar = "#" * round(_BAR_LENGTH * counts[power] / counts.max())
        lengths_in_bin = f"{2**power:,} to {2 ** (power + 1) - 1:,}"
        lines.append(f"  {lengths_in_bin:>25}  {counts[power]:>12,}  {bar}".rstrip())
    return "\n".join(lines)


def describe_sample(
    store: Store, split: Split, count: int, seed: int, width: int
) -> str:
    """Return the beginnings of `count` random documents as lines of text."""
    tokens = store.split(split)
    count = min(count, tokens.num_documents)
    random = np.random.default_rng(seed)
    numbers = random.choice(tokens.num_documents, count, replace=False)
    lines = []
    for number in sorted(numbers.tolist()):
        start, stop = tokens.array("offsets", number, number + 2).tolist()
        ids = tokens.read(start, min(stop, start + width))
        text = decode(store.encoding, ids)[:width]
        lines.append(f"{document_id(tokens, number)} ({stop - start:,} tokens)")
        lines += [f"  | {line}" for line in text.splitlines()]
    return "\n".join(lines)


def describe_batch(excerpts: Iterator[Excerpt], width: int) -> Iterator[str]:
    """Yield a header, then a line for each excerpt with the beginning of its text."""
    yield "row  column  source  document (tokens from, number)  text"
    for excerpt in excerpts:
        position = f"{excerpt.row:>3}  {excerpt.column:>6}  {excerpt.source}"
        document = (
            f"{excerpt.document} ({excerpt.first_token}, {excerpt.document_number})"
        )
        text = ascii(excerpt.text[:width]) if width else ""
        yield f"{position}  {document}  {text}"
