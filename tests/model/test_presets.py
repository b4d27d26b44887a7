"""How many parameters the presets have, and a token meets."""

import pytest

from model.gpt import num_active_params, num_params

pytestmark = pytest.mark.usefixtures("strict")


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("gpt2_124m", 124_439_808),
        ("gpt2_1558m", 1_557_611_200),
        ("llama3_1b", 1_235_814_400),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("gpt_oss_20b", 20_914_757_184),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(composed, preset, count):
    assert num_params(composed(f"model={preset}").model) == count


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("llama3_1b", 1_235_814_400),
        ("mixtral_8x7b", 12_879_925_248),
        ("qwen3_30b_a3b", 3_353_032_704),
        ("gpt_oss_20b", 4_187_440_704),  # 3.61 B and what looks tokens up
    ],
)
def test_a_token_meets_as_many_as_were_published(composed, preset, count):
    assert num_active_params(composed(f"model={preset}").model) == count


def test_the_default_is_as_small_as_its_file_says(composed):
    assert num_params(composed().model) == pytest.approx(0.9e6, rel=0.05)
