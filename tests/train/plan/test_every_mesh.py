"""Every preset is planned on a mesh that training accepts, or is refused."""

import json
import random
from contextlib import suppress

import pytest

from train.cli.presets import CONFIG_DIR
from train.cli.rules import config_mistakes
from train.config import MESH_AXES
from train.errors import ConfigError
from train.hardware.targets import parse_target
from train.plan.budget import MemoryBudget
from train.plan.page import page_data
from train.plan.plan import estimate

AMPLE = MemoryBudget(*[2**50] * 3)
PRESETS = sorted(path.stem for path in (CONFIG_DIR / "model").glob("*.yaml"))
TARGETS = {
    "gpu": ("h100-8", "h100-8x2", "a100-4", "b200-8x4", "h200-2"),
    "tpu": ("v5e-8", "v5e-16x4", "v5p-16x2", "v6e-16", "v4-8", "tpu7x-16"),
}
CHOICES = (
    ("optimizer=adamw", "optimizer=muon", "optimizer=adafactor", "optimizer=lion"),
    ("data.sequence_length=256", "data.sequence_length=384"),
    ("train.remat=none", "train.remat=full", "train.remat=dots"),
    ("train.accumulation_steps=1", "train.accumulation_steps=2"),
)
MIXTRAL = (
    *("model=mixtral_8x7b", "optimizer=adamw", "data.sequence_length=4096"),
    *("data.batch_size=1024", "train.remat=full", "train.pipeline_microbatches=8"),
)


def factors(number: int) -> list[int]:
    """Return the prime factors of a power of two."""
    return [2] * (number.bit_length() - 1)


def draw_mesh(rng: random.Random, target: str) -> list[str]:
    """Return overrides that put a target's devices on some mesh axes."""
    machine = parse_target(target)
    axes = rng.sample(MESH_AXES, rng.choice([1, 2, 2, 3]))
    sizes = dict.fromkeys(MESH_AXES, 1)
    dcn = dict.fromkeys(MESH_AXES, 1)
    for factor in factors(machine.num_devices // machine.slices):
        sizes[rng.choice(axes)] *= factor
    for factor in factors(machine.slices):
        axis = rng.choice(axes)
        sizes[axis] *= factor
        dcn[axis] *= factor
    overrides = [f"mesh.{axis}={size}" for axis, size in sizes.items() if size > 1]
    return overrides + [f"mesh.dcn.{a}={n}" for a, n in dcn.items() if n > 1]


@pytest.fixture
def plan(composed, lay_out):
    """Return a function that plans a command line as `train.plan` does."""

    def plan(target: str, overrides: list[str]) -> dict:
        config = composed(["tracker=none", *overrides])
        if mistakes := config_mistakes(config):
            raise ConfigError(mistakes)
        result = estimate(lay_out(config, target), AMPLE)
        values = result.as_json() | page_data(result, overrides)
        return json.loads(json.dumps(values, allow_nan=False))

    return plan


@pytest.mark.slow
@pytest.mark.parametrize("platform", TARGETS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_planned_on_random_meshes_or_refused(plan, preset, platform):
    rng = random.Random(f"{preset} {platform}")
    # A published size has the same kinds of layers as its nano.
    num_meshes = 6 if "nano" in preset else 2
    for _ in range(num_meshes):
        target = rng.choice(TARGETS[platform])
        choices = [rng.choice(values) for values in CHOICES]
        mesh = draw_mesh(rng, target)
        shape = (f"model={preset}", "model.vocab_size=32000", "data.batch_size=64")
        with suppress(ConfigError):
            values = plan(target, [*shape, *choices, *mesh])
            assert values["needed"]["bytes"] > 0


def test_the_heads_that_ulysses_exchanges_are_traced_as_they_are(plan):
    """Traces give the tensor axis size 2, although it has size 1 here."""
    shape = ("model=gpt2_nano", "data.batch_size=64", "data.sequence_length=256")
    values = plan("v5e-8", [*shape, "mesh.fsdp=2", "mesh.context=4"])
    assert values["needed"]["bytes"] > 0


@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.pipeline=4", "mesh.fsdp=16", "mesh.dcn.pipeline=4", "mesh.dcn.fsdp=2"),
        pytest.param(
            (
                *("mesh.pipeline=4", "mesh.fsdp=2", "mesh.expert=8"),
                *("mesh.dcn.pipeline=4", "mesh.dcn.fsdp=2"),
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_in_tiles_on_a_pipeline_of_gpus_are_planned(plan, mesh):
    values = plan("h100-8x8", [*MIXTRAL, *mesh])
    assert values["prediction"]["step_s"]["low"] > 0
