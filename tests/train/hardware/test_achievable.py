"""What the constants of programs' rates promise, whatever their values."""

from itertools import pairwise

import pytest

from train.hardware.achievable import AMPERE, BLACKWELL, HOPPER, TPU, TPU_V6E, slowest
from train.hardware.chips import CHIPS


@pytest.mark.parametrize("kind", [AMPERE, HOPPER, BLACKWELL])
def test_attention_is_faster_for_long_rows_and_wide_heads(kind):
    part = kind.attention.part
    lengths = [part(128, length) for length in (128, 512, 2048, 8192, 2**20)]
    assert all(0 < less < more < 1 for less, more in pairwise(lengths))
    assert part(64, 2048) < part(128, 2048)
    assert part(32, 2048) == part(64, 2048)
    assert part(100, 2048) == part(64, 2048)
    assert part(256, 2048) == part(128, 2048)


def test_the_slowest_of_more_parts_is_slower():
    times = [slowest(parts, 0.014) for parts in (1, 2, 8, 64, 512)]
    assert times[0] == 1
    assert times == sorted(set(times))


def test_every_chip_gets_less_than_its_vendor_states():
    for chip in CHIPS.values():
        part = chip.achievable
        assert (part in (TPU, TPU_V6E)) == chip.kind.startswith("TPU")
        for share in (part.products, part.memory, part.links, part.network):
            assert 0 < share < 1
