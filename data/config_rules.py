"""The rules that relate several keys of text, tokenizer, rows and batches."""

import difflib
from collections.abc import Iterator
from dataclasses import asdict
from math import inf
from pathlib import Path

from data.config import PUBLISHED, UNNAMED, DataConfig, Packing, Source
from data.errors import Mistake


def data_mistakes(data: DataConfig) -> Iterator[Mistake]:
    """Yield the invalid values, and the values that contradict each other."""
    source = data.source
    if source not in (Source.python, Source.mixture) and not data.path:
        kind = "a store" if source is Source.tokens else "a file or a folder"
        kind = "the prefix of files" if source is Source.megatron else kind
        yield Mistake("data.path", data.path, f"must name {kind} with data={source}")
    elif source in (Source.python, Source.mixture) and data.path:
        rule = f"is not read by data={source}; add data=text or data=tokens"
        yield Mistake("data.path", data.path, rule)
    if source is not Source.text:
        rule = "is only for data=text; a token store was made with its own"
        if data.format is not None:
            yield Mistake("data.format", data.format, rule)
        if data.text_field != "text":
            yield Mistake("data.text_field", data.text_field, rule)
    yield from text_field_mistakes(data.text_field, "data.")
    if data.tokenizer == UNNAMED:
        rule = "must name the tokenizer, say gpt2: token files do not say which it is"
        yield Mistake("data.tokenizer", data.tokenizer, rule)
    else:
        sha256 = data.tokenizer_sha256
        yield from tokenizer_mistakes(data.tokenizer, sha256, "data.")
    if data.packing is not Packing.concat and not data.document_mask:
        rule = "needs data.document_mask=true: rows hold documents side by side"
        yield Mistake("data.packing", data.packing, rule)
    if data.document_start is not None and not data.document_mask:
        rule = "has no effect with data.document_mask=false; leave one of them out"
        yield Mistake("data.document_start", data.document_start, rule)
    pairs = data.skip_batches
    if len(pairs) % 2 or pairs != sorted(pairs):
        rule = "must be pairs, ascending: the first and last batch to leave out"
        yield Mistake("data.skip_batches", pairs, rule)
    yield from _schedule_mistakes(data)
    yield from _mixture_mistakes(data)


def tokenizer_mistakes(
    name: str, sha256: str | None, section: str = ""
) -> list[Mistake]:
    """List what is wrong with a tokenizer's name, or a missing hash of a rank file.

    The keys begin with `section`.
    """
    known_names = ("bytes", *PUBLISHED)
    path = Path(name)
    if name in known_names or sha256 is not None or path.expanduser().is_dir():
        return []
    if path.name != name or path.suffix or path.exists():
        rule = f"is required with a rank file: sha256sum {name}"
        rule += "; a folder with tokenizer.json needs none"
        return [Mistake(f"{section}tokenizer_sha256", None, rule)]
    matches = difflib.get_close_matches(name, known_names, n=1)
    hint = f"; did you mean {matches[0]}?" if matches else ""
    rule = f"must be one of {', '.join(known_names)}, or a rank file's path{hint}"
    return [Mistake(f"{section}tokenizer", name, rule)]


def text_field_mistakes(value: object, section: str = "") -> list[Mistake]:
    """List what is wrong with the fields of a text; the key begins with `section`."""
    fields = value if isinstance(value, list) else [value]
    if fields and all(isinstance(field, str) and field for field in fields):
        return []
    rule = "must be a field, say text, or a list of fields, say [title, body]"
    return [Mistake(f"{section}text_field", value, rule)]


def _schedule_mistakes(data: DataConfig) -> Iterator[Mistake]:
    """Yield mistakes in when batches and rows change their sizes."""
    for field in ("batch_schedule", "sequence_schedule"):
        key = f"data.{field}"
        changes = getattr(data, field)
        values = [asdict(change) for change in changes]
        if any((c.from_step is None) == (c.from_tokens is None) for c in changes):
            rule = "must give either from_step or from_tokens in each change"
            yield Mistake(key, values, rule)
        steps = [c.from_step for c in changes if c.from_step is not None]
        tokens = [c.from_tokens for c in changes if c.from_tokens is not None]
        if steps != sorted(set(steps)) or tokens != sorted(set(tokens)):
            yield Mistake(key, values, "must be in ascending order")
    for i, change in enumerate(data.sequence_schedule):
        if data.sequence_length % change.length:
            rule = f"must divide data.sequence_length={data.sequence_length}"
            yield Mistake(f"data.sequence_schedule[{i}].length", change.length, rule)


def _mixture_mistakes(data: DataConfig) -> Iterator[Mistake]:
    """Yield mistakes in the sources of a mixture, and in their weights."""
    if data.source is not Source.mixture:
        for field in ("sources", "weight_changes"):
            if value := getattr(data, field):
                yield Mistake(f"data.{field}", value, "is only for data=mixture")
        return
    if not data.sources:
        rule = "must name stores: 'data.sources={web: {path: stores/web}, ...}'"
        yield Mistake("data.sources", data.sources, rule)
    for name, source in data.sources.items():
        if not source.path:
            rule = "must name a store that python -m data.prepare made"
            yield Mistake(f"data.sources.{name}.path", source.path, rule)
    steps = [change.step for change in data.weight_changes]
    if steps != sorted(set(steps)) or (steps and steps[0] < 1):
        rule = "must come at steps from 1 on, in ascending order"
        yield Mistake("data.weight_changes", steps, rule)
    weights = {name: source.weight for name, source in data.sources.items()}
    later_weights = [change.weights for change in data.weight_changes]
    all_weights = (weights, *later_weights)
    for step, step_weights in zip((0, *steps), all_weights, strict=True):
        if rule := _broken_rule(data, step_weights):
            key = "data.weight_changes" if step else "data.sources"
            yield Mistake(key, step_weights, f"at step {step} {rule}")


def _broken_rule(data: DataConfig, weights: dict[str, float]) -> str | None:
    """Return the rule that the weights of one step break, or None."""
    if unknown := sorted(set(weights) - set(data.sources)):
        return f"name no source: {', '.join(unknown)}"
    if not all(0 <= weight < inf for weight in weights.values()):
        return "must be at least 0 and finite"
    if not any(weights.values()):
        return "need one above 0" if data.sources else None
    from data.mixture import broken_period_rule  # slow: imports NumPy

    return broken_period_rule(list(weights.values()))
