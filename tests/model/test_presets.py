"""How many parameters the presets have, and a token meets."""

import pytest

from model.gpt import num_active_params, num_params

pytestmark = pytest.mark.usefixtures("strict")


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("gpt2_1558m", 1_557_611_200, 1_557_611_200),
        ("llama3_70b", 70_553_706_496, 70_553_706_496),
        ("llama3_405b", 405_853_388_800, 405_853_388_800),
        ("mixtral_8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704),
        # The published 3.61 B are without the table that looks tokens up.
        ("gpt_oss_20b", 20_914_757_184, 4_187_440_704),
    ],
)
def test_a_preset_has_the_published_numbers_of_parameters(
    composed, preset, total, active
):
    model = composed(f"model={preset}").model
    assert (num_params(model), num_active_params(model)) == (total, active)


def test_the_default_is_as_small_as_its_file_says(composed):
    assert num_params(composed().model) == pytest.approx(0.9e6, rel=0.05)
