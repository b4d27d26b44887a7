"""Layers form few segments with short patterns."""

import pytest

from model.choices import Mlp
from model.config import ModelConfig
from model.pattern import kinds_of, segments_of

SPARSE = {"mlp": Mlp.moe, "num_experts": 2}
WINDOWS = {"window": 4, "layer_pattern": ("local", "global")}
HYBRID = (*["gated_delta"] * 3, "attention")
DENSE_FIRST = {**SPARSE, "dense_layers": 1}


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ({"num_layers": 12}, [(1, 12)]),
        (
            {"num_layers": 6, "window": 4, "layer_pattern": ("local", "global")},
            [(1, 6)],
        ),
        ({"num_layers": 61, **SPARSE, "dense_layers": 3}, [(1, 3), (1, 58)]),
        ({"num_layers": 48, **SPARSE, "experts_every": 2}, [(2, 24)]),
        ({"num_layers": 7, **DENSE_FIRST, "experts_every": 3}, [(1, 1), (3, 2)]),
        # Without a repetition, each run of equal layers is a segment.
        ({"num_layers": 3, **DENSE_FIRST, "experts_every": 2}, [(1, 2), (1, 1)]),
        ({"num_layers": 126}, [(1, 126)]),
        ({"num_layers": 8, **SPARSE, "mixer_pattern": HYBRID}, [(4, 2)]),
        ({"num_layers": 6, "mixer_pattern": HYBRID}, [(1, 3), (1, 1), (1, 2)]),
    ],
)
def test_segments_are_few_and_their_patterns_short(config, shapes):
    model = ModelConfig(**config)
    segments = segments_of(model)
    assert [(len(s.pattern), s.repeats) for s in segments] == shapes
    kinds = {
        layer: kind
        for segment in segments
        for slot, kind in enumerate(segment.pattern)
        for layer in segment.layers(slot)
    }
    assert [kinds[layer] for layer in range(model.num_layers)] == kinds_of(model)
