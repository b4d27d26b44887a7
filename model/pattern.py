"""The kinds of a model's layers, and the segments that the layers form.

A segment repeats a pattern of blocks, and one scan runs it. Blocks of different kinds
have different parameters, so they have different slots in the pattern. The segments
are a function of the model's config only, because checkpoints are laid out by them.
"""

from functools import cache
from typing import NamedTuple

from model.choices import Mlp
from model.config import ModelConfig


class BlockKind(NamedTuple):
    """The properties of a block that decide which parameters it has."""

    mixer: str
    experts: bool


class Segment(NamedTuple):
    """Consecutive layers that one scan runs.

    pattern: the kinds of the blocks that one iteration runs, in order.
    repeats: the number of iterations.
    first: the number of the first layer.
    """

    pattern: tuple[BlockKind, ...]
    repeats: int
    first: int

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.pattern) * self.repeats

    def layers(self, slot: int) -> range:
        """Return the numbers of the layers at one slot of the pattern."""
        size = len(self.pattern)
        return range(self.first + slot, self.first + self.num_layers, size)


def kinds_of(config: ModelConfig) -> list[BlockKind]:
    """Return the kind of each layer."""
    every = config.experts_every
    expert_layers = range(config.dense_layers + every - 1, config.num_layers, every)
    has_experts = config.mlp is Mlp.moe
    return [
        BlockKind(mixer, has_experts and layer in expert_layers)
        for layer, mixer in enumerate(config.mixers)
    ]


def segments_of(config: ModelConfig) -> tuple[Segment, ...]:
    """Return the segments of a model.

    There are as few segments as possible, and then as few blocks in their patterns.
    Only a pattern of one block may run once. Among equal choices, earlier segments have
    more layers, so that a remainder comes last.
    """
    return _segments(tuple(kinds_of(config)))


@cache
def _segments(kinds: tuple[BlockKind, ...], first: int = 0) -> tuple[Segment, ...]:
    """Return the segments of the layers from `first` on."""
    if first == len(kinds):
        return ()
    candidates = list[tuple[Segment, ...]]()
    for size in range(1, (len(kinds) - first) // 2 + 2):
        pattern = kinds[first : first + size]
        stop = first
        while kinds[stop : stop + size] == pattern:
            stop += size
            repeats = (stop - first) // size
            if size == 1 or repeats > 1:
                segment = Segment(pattern, repeats, first)
                candidates.append((segment, *_segments(kinds, stop)))
    return min(
        candidates,
        key=lambda segments: (
            len(segments),
            sum(len(segment.pattern) for segment in segments),
            -segments[0].num_layers,
        ),
    )
