"""What makes a run the run it is: its name, and what a change of config means to it.

Each key is of one kind: harmless, allowed (and recorded), or refused, since it would
be another run. The name hashes just the refused ones, so that the same command
always means the same run.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from enum import StrEnum
from typing import Any, NamedTuple

from train.config import Config
from train.errors import as_typed
from train.masking import mask_values


class ChangeKind(StrEnum):
    """What changing a key means to a run that exists."""

    harmless = "harmless"  # logging, paths, machine
    allowed = "allowed"  # recorded
    refused = "refused"  # it would be another run


HARMLESS = (
    *("log", "tracker", "checkpoint", "runtime", "run", "profile", "plan", "eval"),
    *("distributed", "watchdog", "train.replica_check_interval_steps"),
    *("data.cache_dir", "data.prefetch"),
)
ALLOWED = (
    *(
        "mesh",
        "optimizer.offload",
        "model.attention",
        "model.layer_unroll",
        "train.num_steps",
    ),
    *(
        "train.remat",
        "train.offload",
        "train.loss_chunk_tokens",
        "train.max_skipped_steps",
    ),
    *("train.accumulation_steps", "train.pipeline_microbatches"),
    "data.skip_batches",
)


class Difference(NamedTuple):
    """One key that differs between two configs."""

    key: str
    old: object
    new: object
    kind: ChangeKind

    def __str__(self) -> str:
        old, new = as_typed(self.old), as_typed(self.new)
        return f"{self.key}: {old} -> {new} ({self.kind})"


def config_differences(old: Config, new: Config) -> list[Difference]:
    """List the keys whose values differ, in the order of the dataclasses.

    Secrets are masked first: another password makes no other run.
    """
    before, after = (
        {key: mask_values(value) for key, value in flatten(config).items()}
        for config in (old, new)
    )
    found = []
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            kind = ChangeKind.refused
            if covered(key, ALLOWED):
                kind = ChangeKind.allowed
            if covered(key, HARMLESS):
                kind = ChangeKind.harmless
            found.append(Difference(key, before.get(key), after.get(key), kind))
    return found


def refused(
    diffs: Iterable[Difference], allow_change: Iterable[str] = ()
) -> list[Difference]:
    """Keep what no run may change, but for the keys (or sections) of `allow_change`."""
    permitted = tuple(allow_change)
    return [
        d
        for d in diffs
        if d.kind is ChangeKind.refused and not covered(d.key, permitted)
    ]


def of_training(config: Config) -> Config:
    """Return the keys of training alone, of a command that has others too."""
    return Config(**{key.name: getattr(config, key.name) for key in fields(Config)})


def run_name(config: Config) -> str:
    """Return run.name, or `<model>-<data>-<8 hex digits>`.

    The digits hash what makes a run itself: each key that a run may not change and
    that differs from its default. So a key added to the program later, at its
    default, renames no run.
    """
    if config.run.name:
        return config.run.name
    own = {diff.key: diff.new for diff in refused(config_differences(Config(), config))}
    text = json.dumps(own, sort_keys=True)
    digits = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{config.model.name}-{config.data.name}-{digits}"


def run_dir(config: Config) -> str:
    """Return run.dir, or `runs/<run name>`."""
    return config.run.dir or f"runs/{run_name(config)}"


def flatten(config: object) -> dict[str, object]:
    """Return every leaf under its full dotted key; a table's entries are leaves."""
    tree = asdict(config)  # pyright: ignore[reportArgumentType]
    return {".".join(path): value for path, value in leaves(tree)}


def leaves(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value that is no mapping, after the names that lead to it."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from (((name, *path), leaf) for path, leaf in leaves(value))
        else:
            yield (name,), value


def covered(key: str, prefixes: Iterable[str]) -> bool:
    """Return whether a key is one of these, or of a section of them."""
    return any(key == p or key.startswith(p + ".") for p in prefixes)
