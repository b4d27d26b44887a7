"""The achievable rates keep these relations, whatever their values are."""

from itertools import pairwise

import pytest

from train.hardware.achievable import AMPERE, HOPPER


@pytest.mark.parametrize("kind", [AMPERE, HOPPER])
def test_attention_is_faster_for_long_rows_and_wide_heads(kind):
    part = kind.attention.fraction
    lengths = [part(128, length) for length in (128, 512, 2048, 8192, 2**20)]
    assert all(0 < less < more < 1 for less, more in pairwise(lengths))
    assert part(64, 2048) < part(128, 2048)
    assert part(32, 2048) == part(64, 2048)
    assert part(100, 2048) == part(64, 2048)
    assert part(256, 2048) == part(128, 2048)
