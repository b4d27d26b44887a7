"""Which text becomes which batches."""

import difflib
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

INT32_MAX = 2**31 - 1  # JAX takes whole numbers as int32
Count = Annotated[int, Ge(1), Le(INT32_MAX)]
Number = Annotated[int, Ge(0), Le(INT32_MAX)]
RunSeed = Annotated[int, Ge(-(2**31)), Lt(2**32)]  # JAX drops further bits
Seed = Annotated[int, Ge(0), Lt(2**32)]  # JAX drops further bits, and numpy a sign
ByteCount = Annotated[int, Ge(1), Le(2**40)]
Mistakes = list[tuple[str, object, str]]  # (field, value, rule and remedy)

PUBLISHED = ("gpt2", "cl100k_base", "o200k_base")  # tokenizers of tiktoken


def tokenizer_mistakes(name: str, sha256: str | None) -> Mistakes:
    """List what is wrong with a tokenizer's name, or with a rank file's hash."""
    published = ("bytes", *PUBLISHED)
    if name in published or sha256 is not None or Path(name).expanduser().is_dir():
        return []
    if Path(name).name != name or Path(name).suffix or Path(name).exists():
        rule = f"is required with a rank file: sha256sum {name}"
        rule += "; a folder with tokenizer.json needs none"
        return [("tokenizer_sha256", None, rule)]
    meant = difflib.get_close_matches(name, published, n=1)
    hint = f"; did you mean {meant[0]}?" if meant else ""
    rule = f"must be one of {', '.join(published)}, or a rank file's path{hint}"
    return [("tokenizer", name, rule)]


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


class OnError(StrEnum):
    """What happens to a record or a file that cannot be used.

    `fail`: the command ends. `skip`: it is left out.
    """

    fail = "fail"
    skip = "skip"


@dataclass(frozen=True)
class MixtureSource:
    """One of the stores of a mixture."""

    path: str = ""  # a folder, gs://, s3:// or http://
    # Share of the rows, relative to the other sources'.
    weight: Annotated[float, Ge(0), Lt(inf)] = 1.0
    # How often its rows may be used; null: without end.
    epochs: Annotated[float, Gt(0)] | None = None


@dataclass(frozen=True)
class WeightChange:
    """Weights from a step on; a source that is not named has weight 0."""

    step: Number = 0  # a batch's number, so that skip_batches moves no row
    weights: dict[str, float] = field(default_factory=dict)  # of the sources, by name


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer, rows and batches. Batch s is a function of this and the seed."""

    name: str = "python"  # for the run's name
    source: Source = Source.python  # where the text comes from
    path: str | None = None  # file or folder of text; a store, for source=tokens
    sources: dict[str, MixtureSource] = field(default_factory=dict)  # for mixture
    weight_changes: list[WeightChange] = field(default_factory=list)  # for mixture
    pattern: str = "**/*"  # which files of a folder
    # What to do with a file that is not text, and with a record that cannot be used.
    on_error: OnError = OnError.fail
    # Part held out, say 0.1: by document; of a single file its end.
    validation: Annotated[float, Gt(0), Lt(1)] = 0.1
    # gpt2, cl100k_base, o200k_base, a rank file, or a folder with tokenizer.json.
    tokenizer: str = "bytes"
    tokenizer_sha256: str | None = None  # required with a rank file
    sequence_length: Count = 256  # T: tokens in a row
    batch_size: Count = 16  # B: rows in the global batch of one step
    packing: Packing = Packing.concat  # how documents become rows
    document_mask: bool = True  # attention stays inside a document
    cache_dir: str | None = None  # of token stores; null: ~/.cache/longhaul
    prefetch: Count = 2  # batches read ahead
    # Batches to leave out: [first,last, ...] (before: data.skip_steps).
    skip_batches: list[Number] = field(default_factory=list)

    def mistakes(self) -> Mistakes:
        """List what does not go together."""
        mistakes: Mistakes = []
        if self.source in (Source.text, Source.tokens) and not self.path:
            kind = "a file or a folder" if self.source is Source.text else "a store"
            rule = f"must name {kind} with data={self.source}"
            mistakes.append(("path", self.path, rule))
        if self.source in (Source.python, Source.mixture) and self.path:
            rule = f"is not read by data={self.source}; add data=text or data=tokens"
            mistakes.append(("path", self.path, rule))
        mistakes += tokenizer_mistakes(self.tokenizer, self.tokenizer_sha256)
        if self.packing is not Packing.concat and not self.document_mask:
            rule = "needs data.document_mask=true: rows hold documents side by side"
            mistakes.append(("packing", self.packing, rule))
        pairs = self.skip_batches
        if len(pairs) % 2 or pairs != sorted(pairs):
            rule = "must be pairs, ascending: the first and last batch to leave out"
            mistakes.append(("skip_batches", pairs, rule))
        return mistakes + self._mixture_mistakes()

    def _mixture_mistakes(self) -> Mistakes:
        mistakes: Mistakes = []
        if self.source is not Source.mixture:
            for key in ("sources", "weight_changes"):
                if value := getattr(self, key):
                    mistakes.append((key, value, "is only for data=mixture"))
            return mistakes
        if not self.sources:
            rule = "must name stores: 'data.sources={web: {path: stores/web}, ...}'"
            mistakes.append(("sources", self.sources, rule))
        for name, source in self.sources.items():
            if not source.path:
                rule = "must name a store that python -m data.prepare made"
                mistakes.append((f"sources.{name}.path", source.path, rule))
        steps = [change.step for change in self.weight_changes]
        if steps != sorted(set(steps)) or (steps and steps[0] < 1):
            rule = "must come at steps from 1 on, in ascending order"
            mistakes.append(("weight_changes", steps, rule))
        weights = {name: source.weight for name, source in self.sources.items()}
        changed = [change.weights for change in self.weight_changes]
        for of_step, step_weights in zip((0, *steps), (weights, *changed), strict=True):
            if unknown := sorted(set(step_weights) - set(self.sources)):
                rule = f"at step {of_step} name no source: {', '.join(unknown)}"
                mistakes.append(("weight_changes", step_weights, rule))
            if not all(0 <= weight < inf for weight in step_weights.values()):
                rule = f"at step {of_step} must be at least 0 and finite"
                mistakes.append(("weight_changes", step_weights, rule))
            if not any(weight > 0 for weight in step_weights.values()) and self.sources:
                rule = f"at step {of_step} need one above 0"
                mistakes.append(("weight_changes", step_weights, rule))
            ordered = [step_weights.get(name, 0) for name in self.sources]
            if any(ordered) and all(0 <= weight < inf for weight in ordered):
                from data.mixture import too_many_digits  # numpy: slow to import

                if rule := too_many_digits(ordered):
                    key = "weight_changes" if of_step else "sources"
                    mistakes.append((key, step_weights, f"at step {of_step} {rule}"))
        return mistakes


@dataclass(frozen=True)
class PrepareConfig:
    """Text to a token store."""

    input: Any = None  # file, folder, glob or URL, or a list of them
    output: str | None = None  # folder of the store: a path, gs:// or s3://
    pattern: str = "**/*"  # which files of a folder
    text_field: str = "text"  # of records
    id_field: str | None = None  # of records; null: file and place
    # Part held out, say 0.01: by document; of a single text its end; 0: nothing.
    validation: Annotated[float, Ge(0), Lt(1)] = 0.01
    # gpt2, cl100k_base, o200k_base, a rank file, or a folder with tokenizer.json.
    tokenizer: str = "bytes"
    tokenizer_sha256: str | None = None  # required with a rank file
    on_error: OnError = OnError.fail  # of a record that cannot be used
    keep_invalid_utf8: bool = False  # of text files: encode such bytes one by one
    max_record_bytes: ByteCount = 2**26  # longer records are bad
    workers: Annotated[int, Ge(1), Le(4096)] | None = None  # processes; null: the cores
    work_dir: str | None = None  # of parts; null: beside output, or the cache folder

    @property
    def inputs(self) -> list[str]:
        """The inputs as a list."""
        inputs = self.input if isinstance(self.input, list) else [self.input]
        return [str(path) for path in inputs if path not in (None, "")]

    def mistakes(self) -> Mistakes:
        """List what does not go together."""
        mistakes: Mistakes = []
        if not self.inputs:
            rule = "must name files, folders or patterns, say input=corpus/"
            mistakes.append(("input", self.input, rule))
        if not self.output:
            rule = "must name the store's folder, say output=stores/corpus"
            mistakes.append(("output", self.output, rule))
        return mistakes + tokenizer_mistakes(self.tokenizer, self.tokenizer_sha256)
