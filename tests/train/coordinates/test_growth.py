"""The command checks that activations do not grow with the size of a model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.conftest import Configure
from train.coordinates.__main__ import CoordinatesConfig, coordinates_mistakes
from train.coordinates.growth import compare_sizes
from train.coordinates.measure import ModelFamily
from train.optimizers.catalog import OPTIMIZERS
from train.resolve import program

BASE = ("optimizer.base_width=16", "optimizer.base_depth=2")
KEYS = (
    *("optimizer=adamw", "optimizer.learning_rate=0.02", "model.num_heads=4"),
    *("model.num_kv_heads=4", "model.init=zero", "optimizer.transfer=completep"),
    "model.qk_norm=true",
    *BASE,
)


@pytest.fixture
def compare(configure: Configure, text: Path, tmp_path: Path) -> Callable:
    """Return a function: (widths, depths) -> the exit code of a comparison."""
    config = configure([*KEYS, f"data.path={text}", f"data.cache_dir={tmp_path}"])
    family = ModelFamily(config)

    def compare(widths: list[int], depths: list[int]) -> int:
        sizes = {"width": widths, "depth": depths}
        output = f"{tmp_path}/page.html"
        return compare_sizes(family, sizes, steps=4, output=output)

    return compare


@pytest.mark.slow
def test_activations_are_flat_with_transfer(
    compare: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
):
    code = compare([16, 32, 64], [2, 4, 8])
    text = capsys.readouterr().out
    assert code == 0, text
    assert "flat  " in text
    assert "Root mean squares by depth" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameter", "width", "depth", "culprit"),
    [
        ("attention.output.weight", 1.0, None, "layer 0, attention: size"),
        ("mlp.down.weight", 1.0, None, "layer 0, MLP: size"),
        ("embedding.weight", None, None, "layer 0, input: change"),
        ("mlp.down.weight", None, 1.0, "first layer, MLP: size"),
        ("head.weight", 1.0, None, "logits: size"),
    ],
)
def test_a_broken_rule_is_named(
    compare: Callable,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    parameter: str,
    width: float | None,
    depth: float | None,
    culprit: str,
):
    """The parameter's rate does not follow the width or depth, or wrongly does."""

    def break_rule(config, model, infos, width_exponent):
        factors = OPTIMIZERS.transfer_factors(config, model, infos, width_exponent)
        width_ratio = model.embed_dim / 16
        depth_ratio = model.num_layers / 2
        for name, original in factors.items():
            if name.endswith(parameter):
                scale = (
                    (width_ratio if width else 1 / width_ratio)
                    if depth is None
                    else depth_ratio
                )
                rate = original.learning_rate * scale
                factors[name] = original._replace(learning_rate=rate)
        return factors

    broken = replace(OPTIMIZERS, transfer_factors=break_rule)
    monkeypatch.setattr(program, "OPTIMIZERS", broken)
    sizes = ([16, 32, 64], []) if depth is None else ([], [2, 4, 8])
    assert compare(*sizes) == 5
    assert f"not flat    {culprit}" in capsys.readouterr().out


def test_widths_must_keep_the_dims_of_heads(configure: Configure):
    config = vars(configure(KEYS).plain())
    (mistake,) = coordinates_mistakes(CoordinatesConfig(**config, widths=[16, 30]))
    assert (mistake.key, mistake.value) == ("widths", [30])
    sizes = {"widths": [], "depths": [4, 2]}
    (mistake,) = coordinates_mistakes(CoordinatesConfig(**config, **sizes))
    assert mistake.key == "depths"
