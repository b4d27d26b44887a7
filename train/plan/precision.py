"""Config changes that save memory or time by using fewer bits or host memory.

They may alter what is learned, or transfer data over PCIe in each step. So a plan
suggests them last, and a search tries them only with `search_precision=true`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from model.choices import ComputeDtype
from train.config import MomentDtype
from train.errors import as_typed


class Change(NamedTuple):
    """A new value for a config key."""

    section: str
    field: str
    value: Any
    description: str

    @property
    def override(self) -> str:
        """The override that makes the change."""
        return f"{self.section}.{self.field}={as_typed(self.value)}"

    def applied(self, config: Any) -> Any:
        """Return a config with this change."""
        section = replace(getattr(config, self.section), **{self.field: self.value})
        return replace(config, **{self.section: section})

    def applies_to(self, config: Any) -> bool:
        """Return whether the key has its default value in a config."""
        section = getattr(config, self.section)
        return getattr(section, self.field) == getattr(type(section)(), self.field)


# Changes that save memory, the least costly in time first, grouped by key.
MEMORY_SAVING = (
    (
        Change("optimizer", "moment_dtype", MomentDtype.bfloat16, "bfloat16 moments"),
        Change("optimizer", "moment_dtype", MomentDtype.int8, "int8 moments"),
    ),
    (Change("optimizer", "offload", True, "moments in host memory"),),
    (Change("train", "offload", ("residual",), "layers' inputs in host memory"),),
)
_COMPUTE_DTYPES = (
    Change("model", "compute_dtype", ComputeDtype.float8, "float8 products"),
    Change("model", "compute_dtype", ComputeDtype.int8, "int8 products"),
)
CHANGES = (*MEMORY_SAVING, _COMPUTE_DTYPES)


def with_changes(config: Any, overrides: Sequence[str]) -> Any:
    """Return a config with the changes of the given overrides."""
    for change in itertools.chain(*CHANGES):
        config = change.applied(config) if change.override in overrides else config
    return config


def combinations(config: Any) -> list[tuple[str, ...]]:
    """Return the combinations of changes to keys at their defaults, shortest first."""
    unset = ([c.override for c in group if c.applies_to(config)] for group in CHANGES)
    selections = itertools.product(*(["", *overrides] for overrides in unset))
    return sorted((tuple(filter(None, chosen)) for chosen in selections), key=len)[1:]
