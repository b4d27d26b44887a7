"""The catalog has a part for each choice in the config."""

from model.catalog import MODEL_PARTS
from model.choices import ComputeDtype, Dtype, Mixer
from model.parts.eight_bits.recipes import RECIPES


def test_each_mixer_has_a_module():
    assert MODEL_PARTS.mixers.keys() == {*Mixer}


def test_each_dtype_of_eight_bits_has_products():
    eight_bits = {*ComputeDtype} - {ComputeDtype(dtype) for dtype in Dtype}
    assert RECIPES.keys() == eight_bits
    for dtype, recipe in RECIPES.items():
        assert recipe().dtype is dtype
