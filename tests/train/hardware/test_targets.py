import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.errors import ConfigError
from train.hardware.chips import CHIPS, chip_of, peak_flops
from train.hardware.targets import Target, parse_target

SIZES = {
    "v5e": (1, 4, 8, 16, 32, 64, 128, 256),
    "v6e": (1, 4, 8, 16, 32, 64, 128, 256),
    "v4": (8, 16, 32, 64, *range(128, 8193, 128)),
    "v5p": (8, 16, 32, 64, *range(128, 17921, 128)),
    "tpu7x": (8, 16, 32, 64, *range(128, 18433, 128)),
    **{gpu: (1, 2, 4, 8) for gpu in ("a100", "h100", "h200", "b200", "b300")},
    **{gpu: (1, 2, *range(4, 73, 4)) for gpu in ("gb200", "gb300")},
}
CORES = ("v4", "v5p", "tpu7x")  # These names count cores, and a chip has two.
NAMES = [(family, size) for family, sizes in SIZES.items() for size in sizes]


@given(st.sampled_from(NAMES), st.none() | st.integers(1, 300))
def test_a_name_means_as_many_chips_as_it_says(named, slices):
    family, size = named
    target = parse_target(f"{family}-{size}" + (f"x{slices}" if slices else ""))
    chips = size // 2 if family in CORES else size
    assert math.prod(target.topology) == chips
    assert target.num_chips == chips * (slices or 1)
    assert target.num_devices == target.num_chips * (2 if family == "tpu7x" else 1)
    assert target.num_hosts * target.chips_per_host == target.num_chips
    for dim, bound in zip(target.topology, target.host_bounds, strict=True):
        assert dim % bound == 0


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v5e-256", (16, 16)),
        ("v5p-8", (2, 2, 1)),
        ("v5p-3072", (8, 12, 16)),
        ("v5p-17920", (16, 20, 28)),
        ("tpu7x-128", (4, 4, 4)),
    ],
)
def test_chips_of_a_slice_stand_as_the_cloud_has_them(name, topology):
    assert parse_target(name).topology == topology


def test_hosts():
    names = ("v5e-1", "v5e-8", "v5e-16", "v5e-8x3", "h100-8x16", "gb300-72x2")
    assert [parse_target(name).num_hosts for name in names] == [1, 1, 4, 3, 16, 36]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e-7", "v5e-4 and v5e-8"),
        ("v5p-130", "v5p-128 and v5p-256"),
        ("h100-3", "n = 1, 2, 4 or 8"),
        ("gb300-74", "multiple of 4 up to 72"),
        ("v5e-8x0", "at least one slice"),
        ("v5e", "v5e-256"),
        ("v3-8", "of v4, v5e"),
    ],
)
def test_what_there_is_not_is_an_error_that_says_what_there_is(name, said):
    with pytest.raises(ConfigError) as error:
        parse_target(name)
    [mistake] = error.value.mistakes
    assert (mistake.key, mistake.value) == ("target", name)
    assert said in mistake.rule


@pytest.mark.parametrize("family", SIZES)
def test_targets_have_the_figures_that_plans_need(family):
    chip = Target("", family, (1,)).chip
    assert chip.flops["bfloat16"] > 1e14
    assert chip.hbm_bytes is not None
    assert chip.hbm_bandwidth is not None
    assert chip.links is not None
    assert chip.link_bandwidth is not None


@pytest.mark.parametrize(
    ("device_kind", "family"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "gh200"),
        *((f"NVIDIA {chip.kind} SXM", family) for family, chip in CHIPS.items()),
    ],
)
def test_a_device_kind_finds_its_chip_and_the_peak_of_one_device(device_kind, family):
    chip = CHIPS[family]
    assert chip_of(device_kind) is chip
    peak = peak_flops(device_kind)
    assert peak is not None
    assert peak * chip.devices == chip.flops["bfloat16"]
    assert peak_flops("cpu") is None
