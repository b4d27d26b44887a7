"""The identity of a run: its name, and the keys that it may not change.

A changed key is harmless, allowed (and recorded), or refused because it would make
another run. The default name hashes only keys whose change is refused, so that the same
command always means the same run.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Any, NamedTuple

from train.config import Config
from train.errors import as_typed
from train.masking import mask_values


class ChangeKind(StrEnum):
    """The consequence of a changed key for an existing run."""

    harmless = "harmless"  # logs, evaluation, paths or settings of the machine
    allowed = "allowed"  # and recorded in the run directory
    refused = "refused"  # because the result would be another run


HARMLESS = (
    *("log", "tracker", "checkpoint", "runtime", "run", "profile", "plan", "eval"),
    *("distributed", "watchdog", "train.replica_check_interval_steps"),
    *("data.cache_dir", "data.prefetch"),
)
ALLOWED = (
    *("mesh", "optimizer.offload", "model.attention", "model.layer_unroll"),
    *("train.num_steps", "train.remat", "train.offload", "train.loss_chunk_tokens"),
    *("train.max_skipped_steps", "train.accumulation_steps"),
    *("train.pipeline_microbatches", "data.skip_batches"),
)


class Difference(NamedTuple):
    """One key that differs between two configs."""

    key: str
    old: object
    new: object
    kind: ChangeKind

    def __str__(self) -> str:
        old = as_typed(self.old)
        new = as_typed(self.new)
        return f"{self.key}: {old} -> {new} ({self.kind})"


def config_differences(
    old: Config, new: Config, allowed: Iterable[str] = ALLOWED
) -> list[Difference]:
    """List the keys whose values differ, in the order of the dataclasses.

    `allowed` are the keys and sections whose change is allowed. Secrets are masked
    first, because a new password does not make another run. data.document_start=null
    equals true, and any value if neither config has a document mask.
    """
    old_values, new_values = map(_masked_values, (old, new))
    is_masked = old.data.document_mask or new.data.document_mask
    for values in (old_values, new_values):
        is_without = is_masked and values["data.document_start"] is False
        values["data.document_start"] = not is_without
    return [
        Difference(key, old_values.get(key), new_values.get(key), _kind(key, allowed))
        for key in dict.fromkeys((*old_values, *new_values))
        if old_values.get(key) != new_values.get(key)
    ]


def _kind(key: str, allowed: Iterable[str]) -> ChangeKind:
    if is_covered(key, HARMLESS):
        return ChangeKind.harmless
    return ChangeKind.allowed if is_covered(key, allowed) else ChangeKind.refused


def refused(
    diffs: Iterable[Difference], allow_change: Iterable[str] = ()
) -> list[Difference]:
    """Return the refused differences, except the keys or sections in `allow_change`."""
    permitted = tuple(allow_change)
    kind = ChangeKind.refused
    return [d for d in diffs if d.kind is kind and not is_covered(d.key, permitted)]


def run_name(config: Config) -> str:
    """Return run.name, or `<model>-<data>-<8 hex digits>`.

    The digits hash every key that a run may not change and that differs from its
    default. So a key that is added to the program later renames no run that leaves
    the key at its default.
    """
    if config.run.name:
        return config.run.name
    diffs = refused(config_differences(config.defaults(), config))
    text = json.dumps({diff.key: diff.new for diff in diffs}, sort_keys=True)
    digits = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{config.model.name}-{config.data.name}-{digits}"


def run_dir(config: Config) -> str:
    """Return run.dir, or `runs/<run name>`."""
    return config.run.dir or f"runs/{run_name(config)}"


def _masked_values(config: object) -> dict[str, object]:
    tree = mask_values(asdict(config))  # pyright: ignore[reportArgumentType]
    return {".".join(path): value for path, value in leaves(tree)}


def flatten(config: object) -> dict[str, object]:
    """Return every value under its full dotted key, including the values of tables."""
    tree = asdict(config)  # pyright: ignore[reportArgumentType]
    return {".".join(path): value for path, value in leaves(tree)}


def leaves(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path of names, value) for every value that is not a mapping."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from (((name, *path), leaf) for path, leaf in leaves(value))
        else:
            yield (name,), value


def is_covered(key: str, prefixes: Iterable[str]) -> bool:
    """Return whether a key equals a prefix or is in a section that a prefix names."""
    return any(key == p or key.startswith(p + ".") for p in prefixes)
