"""Records of mixers name keys that exist; each dtype of 8 bits has its products."""

import pytest

from model.choices import ComputeDtype, Dtype
from model.config import LOGICAL_AXES
from model.mixer_catalog import MIXERS
from model.parts.eight_bits.recipes import RECIPES
from train.config.model import ModelSection
from train.identity import flatten


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_record_of_a_mixer_names_keys_that_exist(mixer):
    kind = MIXERS[mixer]
    config = ModelSection(mixer=mixer, query_rank=16)
    keys = set(flatten(config))
    assert {*kind.small_sizes, *kind.width_keys} <= keys
    for prefix in kind.keys:
        assert any(key.startswith(prefix) for key in keys), prefix
    assert {dim.key for dim in kind.dims(config)} <= keys
    assert {dim.axis for dim in kind.dims(config)} <= {*LOGICAL_AXES}
    if kind.least_piece is not None:
        assert kind.least_piece(config).key in keys


def test_each_dtype_of_eight_bits_has_products():
    eight_bits = {*ComputeDtype} - {ComputeDtype(dtype) for dtype in Dtype}
    assert RECIPES.keys() == eight_bits
    for dtype, recipe in RECIPES.items():
        assert recipe().dtype is dtype
