"""Schedules follow their formulas."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.config import BatchChange, DataConfig, LengthChange
from data.phases import step_at, tokens_before
from train.config import DecayShape, Schedule, ScheduleConfig, SchedulePoint
from train.core.optimizer.schedule import make_schedule

SQRT = DecayShape.sqrt
LINEAR = {"decay_fraction": 1.0}
LINEAR_TO_ZERO = {**LINEAR, "final_fraction": 0.0}
POWER = {"power_exponent": 0.5, "power_start_step": 20, "decay_fraction": 0.2}
POINTS = {
    "points": [
        *(SchedulePoint(step=10, factor=1.0), SchedulePoint(step=50, factor=0.5)),
        SchedulePoint(fraction=1.0, factor=0.0),
    ]
}


@pytest.mark.parametrize("final", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("peak", [1.0, 1.5**0.5])
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        *(("cosine", {}), ("wsd", {}), ("power", {}), ("wsd", {"decay_shape": SQRT})),
        *(("wsd", {"earlier_decays": [700]}), ("wsd", LINEAR), ("piecewise", {})),
    ],
)
def test_a_schedule_ends_at_its_final_fraction_exactly(name, extra, peak, final):
    """The schedule is compiled for an unknown step, as in a training step."""
    points = [SchedulePoint(step=9), SchedulePoint(fraction=1.0, factor=final)]
    config = ScheduleConfig(
        **{"name": Schedule(name), "points": points, "final_fraction": final, **extra}
    )
    rate = jax.jit(make_schedule(config, 1600, peak))
    end = np.float32(final) if peak == 1 else np.float32(peak) * np.float32(final)
    assert float(rate(1599)) > end
    assert [float(rate(step)) for step in (1600, 5000)] == [end] * 2


def test_a_level_schedule_stays_at_its_peak_exactly():
    config = ScheduleConfig(Schedule.constant, warmup_steps=7)
    rates = jax.vmap(make_schedule(config, 60, peak=0.7))(jnp.arange(6, 90))
    assert set(rates.tolist()) == {float(np.float32(0.7))}


def formula(name: str, step: int) -> float:
    """Return a schedule of 60 steps with a warm-up of 7, as its paper writes it."""
    if step < 7:
        return (step + 1) / 7
    match name:
        case "cosine":
            return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 7) / 53)) / 2
        case "linear":
            return 1 - 0.9 * (step - 7) / 53
        case "wsd":  # 18 steps are 30 % of 60.
            return 1 if step < 42 else 1 - 0.9 * (step - 42) / 18
        case "wsd_sqrt":
            return 1 if step < 42 else 1 - 0.9 * math.sqrt((step - 42) / 18)
        case "power":
            level = (7 / min(step, 42)) ** 0.51
            return level - (level - 0.1) * max(0, step - 42) / 18
        case "piecewise":
            return 1 - 0.5 * (step - 7) / 13 if step < 20 else 0.5 + (step - 20) / 40
        case _:
            raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("cosine", {"name": Schedule.cosine}),
        ("linear", {"name": Schedule.wsd, "decay_fraction": 1.0}),
        ("wsd", {"name": Schedule.wsd}),
        ("wsd_sqrt", {"name": Schedule.wsd, "decay_shape": SQRT}),
        ("power", {"name": Schedule.power}),
        ("piecewise", {"name": Schedule.piecewise}),
    ],
)
def test_every_step_has_the_rate_of_the_formula(name, extra):
    points = [(7, 1.0), (20, 0.5), (60, 1.5)]
    config = ScheduleConfig(
        **{"warmup_steps": 7, "final_fraction": 0.1, **extra},
        points=[SchedulePoint(step=step, factor=factor) for step, factor in points],
    )
    rates = jax.jit(jax.vmap(make_schedule(config, 60)))(jnp.arange(60))
    expected = [formula(name, step) for step in range(60)]
    np.testing.assert_allclose(rates, expected, rtol=2e-6)


def test_points_and_warm_up_in_tokens_follow_the_batch_sizes():
    """Steps have 4 x 16 tokens, and 8 x 16 from step 10 on, after 640 tokens."""
    data = DataConfig(
        batch_size=4,
        sequence_length=16,
        batch_schedule=[BatchChange(from_step=10, rows=8)],
    )
    points = {0: 0, 640: 10, 641: 11, 768: 11, 1280: 15, 1281: 16}
    config = ScheduleConfig(
        Schedule.piecewise,
        warmup_tokens=129,
        points=[SchedulePoint(tokens=tokens, factor=tokens) for tokens in points],
    )
    for skip_batches in ([], [1, 12]):  # Skipping batches moves no point.
        in_steps = config.in_steps(replace(data, skip_batches=skip_batches))
        assert in_steps.warmup_steps == 3
        assert in_steps.piecewise_points(50) == [(s, t) for t, s in points.items()]
        assert in_steps.in_steps(DataConfig()) == in_steps


@pytest.mark.parametrize("tokens", [0.0, 1.0, 999.5, 1300.0, 5e4])
def test_a_position_in_tokens_becomes_the_first_step_after_them(tokens):
    data = DataConfig(
        batch_size=4,
        sequence_length=16,
        batch_schedule=[BatchChange(5, rows=8), BatchChange(from_tokens=1300, rows=6)],
        sequence_schedule=[LengthChange(from_step=2, length=4)],
    )
    step = step_at(data, tokens)
    assert tokens_before(data, step) >= tokens
    assert step == 0 or tokens_before(data, step - 1) < tokens


@pytest.mark.parametrize(
    ("name", "extra", "points"),
    [
        ("constant", {}, {0: 0.1, 4: 0.5, 9: 1, 10: 1, 99: 1, 500: 1}),
        ("cosine", {}, {0: 0.1, 9: 1, 10: 1, 55: 0.55, 100: 0.1, 500: 0.1}),
        ("wsd", {}, {0: 0.1, 9: 1, 70: 1, 85: 0.55, 100: 0.1, 500: 0.1}),
        ("wsd", {"decay_steps": 20}, {9: 1, 80: 1, 90: 0.55, 100: 0.1}),
        ("wsd", {"final_fraction": 0.0}, {70: 1, 85: 0.5, 100: 0}),
        ("wsd", {"decay_fraction": 0.5}, {50: 1, 75: 0.55, 100: 0.1}),
        # The decay is linear to zero and takes all steps after the warm-up.
        ("wsd", LINEAR_TO_ZERO, {9: 1, 10: 1, 55: 0.5, 82: 0.2, 100: 0}),
        # The rate falls as 1 - sqrt(x): here after a quarter of the decay.
        ("wsd", {"decay_shape": SQRT, "decay_steps": 40}, {60: 1, 70: 0.55, 100: 0.1}),
        # Each decay takes 10 % of the steps until its end; the peak returns between.
        (
            *("wsd", {"decay_fraction": 0.1, "earlier_decays": [40]}),
            {36: 1, 38: 0.55, 39: 0.325, 40: 1, 90: 1, 95: 0.55, 100: 0.1},
        ),
        # The rate is (step / 20)^-0.5 from step 20 on, and linear from step 80 on.
        ("power", POWER, {9: 1, 20: 1, 80: 0.5, 90: 0.3, 100: 0.1, 500: 0.1}),
        ("piecewise", POINTS, {0: 0.1, 10: 1, 30: 0.75, 50: 0.5, 75: 0.25, 200: 0}),
    ],
)
def test_schedules_have_known_rates_at_some_steps(name, extra, points):
    config = ScheduleConfig(**{"name": Schedule[name], "warmup_steps": 10, **extra})
    schedule = make_schedule(config, num_steps=100)
    for step, value in points.items():
        assert float(schedule(jnp.int32(step))) == pytest.approx(value, abs=1e-6), step


@pytest.mark.parametrize(("warmup", "start"), [(100, 100), (84, 84), (83, 84)])
def test_a_decay_that_does_not_fit_after_the_warm_up_is_shorter(warmup, start):
    """The decay takes 36 of 120 steps (30 %), so it begins at step 84 or later."""
    config = ScheduleConfig(Schedule.wsd, warmup_steps=warmup, final_fraction=0)
    schedule = make_schedule(config, num_steps=120)
    for step, value in {start: 1, (start + 120) // 2: 0.5, 120: 0, 200: 0}.items():
        assert float(schedule(jnp.int32(step))) == pytest.approx(value, abs=1e-6)
    assert config.decay_start(120) == start
