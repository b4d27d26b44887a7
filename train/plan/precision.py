"""What a step gains by fewer bits, or by the hosts' memory.

These change what is learned, if little, or have hosts send a part of the state over
PCIe in each step: they are advised where nothing else makes a step fit, and a search
weighs them when it is asked to (`search_precision`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from model.choices import ComputeDtype
from train.config import MomentDtype


class Change(NamedTuple):
    """One key's other value; of a key at most one is chosen."""

    section: str
    field: str
    value: Any
    words: str

    @property
    def key(self) -> str:
        """The key."""
        return f"{self.section}.{self.field}"

    @property
    def override(self) -> str:
        """What to type."""
        value = self.value
        if isinstance(value, tuple):
            value = f"[{','.join(value)}]"
        return f"{self.key}={str(value).lower() if value is True else value}"

    def applied(self, config: Any) -> Any:
        """Return a config with this value."""
        section = getattr(config, self.section)
        section = replace(section, **{self.field: self.value})
        return replace(config, **{self.section: section})

    def is_open(self, config: Any) -> bool:
        """Tell whether a config leaves the key at its default."""
        section = getattr(config, self.section)
        return getattr(section, self.field) == getattr(type(section)(), self.field)


# What needs less memory first, the cheapest in time first; then what is only faster.
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
    """Return a config with some of the changes."""
    for override in overrides:
        config = CHANGES[override].applied(config)
    return config


def combinations(config: Any) -> list[tuple[str, ...]]:
    """Return the changes that a config leaves open, with each other, fewest first."""
    left = [change for change in CHANGES.values() if change.is_open(config)]
    keys = itertools.groupby(left, lambda change: change.key)
    choices = [("", *(change.override for change in group)) for _, group in keys]
    chosen = (tuple(filter(None, combo)) for combo in itertools.product(*choices))
    return sorted(filter(None, chosen), key=len)
