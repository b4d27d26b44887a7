"""The presets have the published numbers of total and active parameters."""

import pytest

from model.catalog import MODEL_PARTS
from model.count import num_active_params, num_params
from model.gpt import abstract_gpt

pytestmark = pytest.mark.usefixtures("strict")


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("gpt2_1558m", 1_557_611_200, 1_557_611_200),
        ("llama3_70b", 70_553_706_496, 70_553_706_496),
        pytest.param(
            "llama3_405b", 405_853_388_800, 405_853_388_800, marks=pytest.mark.slow
        ),
        ("mixtral_8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704),
        ("qwen3_next_80b_a3b", 79_674_391_296, 3_874_929_408),
        ("qwen3_5_35b_a3b", 34_660_610_688, 3_454_988_928),
        ("glm_4_5_air", 106_852_251_264, 13_424_129_664),
        ("deepseek_v2_lite", 15_706_484_224, 2_661_150_208),
        ("deepseek_v3", 671_026_419_200, 37_552_297_472),
        pytest.param(
            "kimi_k2", 1_026_408_232_448, 32_861_500_928, marks=pytest.mark.slow
        ),
        # The published 3.61 B and 5.13 B leave out the table that looks tokens up.
        ("gpt_oss_20b", 20_914_757_184, 4_187_440_704),
        pytest.param(
            "gpt_oss_120b", 116_829_156_672, 5_711_982_912, marks=pytest.mark.slow
        ),
        pytest.param(
            "qwen3_235b_a22b", 235_093_634_560, 22_190_763_520, marks=pytest.mark.slow
        ),
        ("olmo3_7b", 7_298_011_136, 7_298_011_136),
        pytest.param(
            "olmo3_32b", 32_233_522_176, 32_233_522_176, marks=pytest.mark.slow
        ),
    ],
)
def test_a_preset_has_the_published_numbers_of_parameters(
    composed, preset, total, active
):
    model = abstract_gpt(composed([f"model={preset}"]).model, MODEL_PARTS)
    assert (num_params(model), num_active_params(model)) == (total, active)


def test_the_default_is_as_small_as_its_file_says(composed):
    model = abstract_gpt(composed().model, MODEL_PARTS)
    assert num_params(model) == pytest.approx(0.9e6, rel=0.05)
