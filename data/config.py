"""Which text becomes which batches."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

PUBLISHED = ("gpt2", "cl100k_base", "o200k_base")  # tokenizers of tiktoken


def rank_file_without_hash(tokenizer: str, sha256: str | None) -> bool:
    """Say whether a tokenizer's name means a file, and no hash is given."""
    return tokenizer not in ("bytes", *PUBLISHED) and sha256 is None


class Source(StrEnum):
    """Where the text comes from.

    `python`: the source code of Python's own standard library, on every machine
    that runs this program. `text`: the file or folder of files at `data.path`, encoded
    on first use. `tokens`: the store at `data.path` that `python -m data.prepare` made.
    `mixture`: several such stores, `data.sources`.
    """

    python = "python"
    text = "text"
    tokens = "tokens"
    mixture = "mixture"


class Packing(StrEnum):
    """How documents become rows.

    `concat`: end to end, cut where a row is full. `best_fit`: whole where they fit,
    several to a row. `none`: one to a row, the rest of which is padding; one longer
    than a row takes several.
    """

    concat = "concat"
    best_fit = "best_fit"
    none = "none"


@dataclass  # not frozen: OmegaConf would take new entries of a table for read-only
class MixtureSource:
    """One of the stores of a mixture."""

    path: str = ""  # a folder, gs://, s3:// or http://
    weight: float = 1.0  # share of the rows, relative to the other sources'
    epochs: float | None = None  # how often its rows may be used; null: without end


@dataclass  # as above
class WeightChange:
    """Weights from a step on; a source that is not named has weight 0."""

    step: int = 0  # a batch's number, so that skip_steps moves no row
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer, rows and batches. Batch s is a function of this and the seed."""

    name: str = "python"
    source: Source = Source.python
    path: str | None = None  # file or folder of text; a store, for source=tokens
    sources: dict[str, MixtureSource] = field(default_factory=dict)  # for mixture
    weight_changes: list[WeightChange] = field(default_factory=list)  # for mixture
    pattern: str = "**/*"  # which files of a folder
    validation: float = 0.1  # part held out: by document; of a single file its end
    tokenizer: str = "bytes"  # gpt2, cl100k_base, o200k_base, or a rank file's path
    tokenizer_sha256: str | None = None  # required with a rank file
    sequence_length: int = 256  # T: tokens in a row
    batch_size: int = 16  # B: rows in the global batch of one step
    packing: Packing = Packing.concat
    document_mask: bool = True  # attention stays inside a document
    cache_dir: str | None = None  # of token stores; null: ~/.cache/longhaul
    prefetch: int = 2  # batches read ahead
    skip_steps: list[int] = field(default_factory=list)  # batches: [first,last, ...]

    def mistakes(self) -> list[tuple[str, object, str]]:
        """List what is wrong as (field, value, rule and remedy)."""
        found: list[tuple[str, object, str]] = []
        for key in ("sequence_length", "batch_size", "prefetch"):
            if getattr(self, key) < 1:
                found.append((key, getattr(self, key), "must be at least 1"))
        if not 0 < self.validation < 1:
            found.append(
                ("validation", self.validation, "must lie between 0 and 1, say 0.1")
            )
        if self.source in (Source.text, Source.tokens) and not self.path:
            kind = "a file or a folder" if self.source is Source.text else "a store"
            rule = f"must name {kind} with data={self.source}"
            found.append(("path", self.path, rule))
        if self.source in (Source.python, Source.mixture) and self.path:
            rule = f"is not read by data={self.source}; add data=text or data=tokens"
            found.append(("path", self.path, rule))
        if rank_file_without_hash(self.tokenizer, self.tokenizer_sha256):
            rule = f"is required with a rank file: sha256sum {self.tokenizer}"
            found.append(("tokenizer_sha256", None, rule))
        if self.packing is not Packing.concat and not self.document_mask:
            rule = "needs data.document_mask=true: rows hold documents side by side"
            found.append(("packing", self.packing, rule))
        pairs = self.skip_steps
        if len(pairs) % 2 or pairs != sorted(pairs) or (pairs and pairs[0] < 0):
            rule = "must be pairs, ascending: the first and last batch to leave out"
            found.append(("skip_steps", pairs, rule))
        return found + self._mixture_mistakes()

    def _mixture_mistakes(self) -> list[tuple[str, object, str]]:
        found: list[tuple[str, object, str]] = []
        if self.source is not Source.mixture:
            for key in ("sources", "weight_changes"):
                if value := getattr(self, key):
                    found.append((key, value, "is only for data=mixture"))
            return found
        if not self.sources:
            rule = "must name stores: 'data.sources={web: {path: stores/web}, ...}'"
            found.append(("sources", self.sources, rule))
        for name, source in self.sources.items():
            if not source.path:
                rule = "must name a store that python -m data.prepare made"
                found.append((f"sources.{name}.path", source.path, rule))
            if not 0 <= source.weight < math.inf:
                rule = "must be at least 0 and finite"
                found.append((f"sources.{name}.weight", source.weight, rule))
            if source.epochs is not None and source.epochs <= 0:
                rule = "must be above 0, or null for no limit"
                found.append((f"sources.{name}.epochs", source.epochs, rule))
        steps = [change.step for change in self.weight_changes]
        if steps != sorted(set(steps)) or (steps and steps[0] < 1):
            rule = "must come at steps from 1 on, in ascending order"
            found.append(("weight_changes", steps, rule))
        weights = {name: source.weight for name, source in self.sources.items()}
        changed = [change.weights for change in self.weight_changes]
        for of_step, given in zip((0, *steps), (weights, *changed), strict=True):
            if unknown := sorted(set(given) - set(self.sources)):
                rule = f"at step {of_step} name no source: {', '.join(unknown)}"
                found.append(("weight_changes", given, rule))
            if not any(weight > 0 for weight in given.values()) and self.sources:
                rule = f"at step {of_step} need one above 0"
                found.append(("weight_changes", given, rule))
        return found


class OnError(StrEnum):
    """What a record that cannot be used does: end the work, or be left out."""

    fail = "fail"
    skip = "skip"


@dataclass(frozen=True)
class PrepareConfig:
    """Text to a token store."""

    input: Any = None  # file, folder, glob or URL, or a list of them
    output: str | None = None  # folder of the store: a path, gs:// or s3://
    pattern: str = "**/*"  # which files of a folder
    text_field: str = "text"  # of records
    id_field: str | None = None  # of records; null: file and place
    validation: float = 0.01  # part held out: by document; of a single text its end
    tokenizer: str = "bytes"  # gpt2, cl100k_base, o200k_base, or a rank file's path
    tokenizer_sha256: str | None = None  # required with a rank file
    on_error: OnError = OnError.fail
    keep_invalid_utf8: bool = False  # of text files: encode such bytes one by one
    max_record_bytes: int = 2**26  # longer records are bad
    workers: int | None = None  # processes; null: the cores
    work_dir: str | None = None  # of parts; null: beside output, or the cache folder

    @property
    def inputs(self) -> list[str]:
        """The inputs as a list."""
        given = self.input if isinstance(self.input, list) else [self.input]
        return [str(path) for path in given if path not in (None, "")]

    def mistakes(self) -> list[tuple[str, object, str]]:
        """List what is wrong as (field, value, rule and remedy)."""
        found: list[tuple[str, object, str]] = []
        if not self.inputs:
            rule = "must name files, folders or patterns, say input=corpus/"
            found.append(("input", self.input, rule))
        if not self.output:
            rule = "must name the store's folder, say output=stores/corpus"
            found.append(("output", self.output, rule))
        if not 0 <= self.validation < 1:
            rule = "must lie in [0, 1), say 0.01; 0 holds nothing out"
            found.append(("validation", self.validation, rule))
        if rank_file_without_hash(self.tokenizer, self.tokenizer_sha256):
            rule = f"is required with a rank file: sha256sum {self.tokenizer}"
            found.append(("tokenizer_sha256", None, rule))
        for name in ("max_record_bytes", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append((name, value, "must be at least 1"))
        return found
