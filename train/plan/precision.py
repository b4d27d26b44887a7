"""Changes of a config that save memory or time with fewer bits or host memory.

They affect what is learned, if only slightly, or transfer a part of the state over PCIe
in each step. So a plan suggests them only if nothing else makes a step fit, and a
search tries them only with `search_precision=true`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from model.choices import ComputeDtype
from train.config import MomentDtype


class Change(NamedTuple):
    """A new value for a config key. At most one change of a key is applied."""

    section: str
    field: str
    value: Any
    words: str

    @property
    def key(self) -> str:
        """The key that changes."""
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
        """Return whether a config leaves the key at its default."""
        section = getattr(config, self.section)
        return getattr(section, self.field) == getattr(type(section)(), self.field)


# Changes that save memory, sorted by the time that they cost.
SMALLER = (
    Change("optimizer", "moment_dtype", MomentDtype.bfloat16, "bfloat16 moments"),
    Change("optimizer", "moment_dtype", MomentDtype.int8, "moments of eight bits"),
    Change("optimizer", "offload", True, "moments in host memory"),
    Change("train", "offload", ("residual",), "layers' inputs in host memory"),
)
CHANGES = {
    change.override: change
    for change in (
        *SMALLER,
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
    """Return all combinations of changes to keys at their defaults, fewest first."""
    changes = [change for change in CHANGES.values() if change.applies_to(config)]
    by_key = itertools.groupby(changes, lambda change: change.key)
    choices = [("", *(change.override for change in group)) for _, group in by_key]
    chosen = (tuple(filter(None, combo)) for combo in itertools.product(*choices))
    return sorted(filter(None, chosen), key=len)
