"""How mesh axes divide the dims of arrays and the layers of a model, without JAX."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


def listed(entry: Any) -> list[Any]:
    """Return the mesh axes that an entry of a rule table names, as a list."""
    if entry is None:
        return []
    return [*entry] if isinstance(entry, list | tuple) else [entry]


def num_shards(sizes: Mapping[str, int], axes: str | Sequence[str] | None) -> int:
    """Return the number of shards of a dim that is sharded over these mesh axes."""
    return math.prod(sizes[axis] for axis in listed(axes))


class PipelineSchedule(NamedTuple):
    """How microbatches pass through stages of layers (model/parts/pipeline.py).

    repeats: the number of groups of layers on each stage.
    microbatches: the number of microbatches that pass through the stages.
    """

    stages: int
    repeats: int
    microbatches: int

    @property
    def iterations(self) -> int:
        """The number of iterations; in each, a stage runs one group of its layers."""
        return self.repeats * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The fraction of the iterations in which a stage is idle."""
        return (self.stages - 1) / self.iterations

    @property
    def local_microbatches(self) -> int:
        """The number of microbatches of each device's local rows."""
        return max(1, self.microbatches // self.stages)
