"""Config changes that save memory or time by using fewer bits or host memory.

The changes may slightly alter what is learned, or transfer moments or activations over
PCIe in each step. So a plan suggests them only if nothing else makes a step fit, and a
search tries them only with `search_precision=true`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from model.choices import ComputeDtype
from train.config import MomentDtype


class Change(NamedTuple):
    """A new value for a config key."""

    section: str
    field: str
    value: Any
    description: str

    @property
    def key(self) -> str:
        """The changed key, for example `train.offload`."""
        return f"{self.section}.{self.field}"

    @property
    def override(self) -> str:
        """The override that makes the change."""
        value = self.value
        if isinstance(value, tuple):
            value = f"[{','.join(value)}]"
        return f"{self.key}={str(value).lower() if value is True else value}"

    def applied(self, config: Any) -> Any:
        """Return a config with this change."""
        section = getattr(config, self.section)
        section = replace(section, **{self.field: self.value})
        return replace(config, **{self.section: section})

    def applies_to(self, config: Any) -> bool:
        """Return whether the key has its default value in a config."""
        section = getattr(config, self.section)
        return getattr(section, self.field) == getattr(type(section)(), self.field)


# Changes that save memory, the least costly in time first.
MEMORY_SAVING = (
    Change("optimizer", "moment_dtype", MomentDtype.bfloat16, "bfloat16 moments"),
    Change("optimizer", "moment_dtype", MomentDtype.int8, "moments of eight bits"),
    Change("optimizer", "offload", True, "moments in host memory"),
    Change("train", "offload", ("residual",), "layers' inputs in host memory"),
)
CHANGES = {
    change.override: change
    for change in (
        *MEMORY_SAVING,
        Change("model", "compute_dtype", ComputeDtype.float8, "float8 products"),
        Change("model", "compute_dtype", ComputeDtype.int8, "int8 products"),
    )
}


def with_changes(config: Any, overrides: Sequence[str]) -> Any:
    """Return a config with the changes of the given overrides."""
    for override in overrides:
        config = CHANGES[override].applied(config)
    return config


def combinations(config: Any) -> list[tuple[str, ...]]:
    """Return the combinations of changes to keys at their defaults, shortest first."""
    changes = [change for change in CHANGES.values() if change.applies_to(config)]
    by_key = itertools.groupby(changes, lambda change: change.key)
    options = [("", *(change.override for change in group)) for _, group in by_key]
    selections = (tuple(filter(None, choice)) for choice in itertools.product(*options))
    return sorted(filter(None, selections), key=len)
