"""Schedules are those of their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.config import DecayShape, Schedule, ScheduleConfig, SchedulePoint
from train.optimizer.schedule import make_schedule

SQRT = DecayShape.sqrt
LINEAR_TO_ZERO = {"decay_fraction": 1.0, "final_fraction": 0.0}
POWER = {"power_exponent": 0.5, "power_start_step": 20, "decay_fraction": 0.2}
POINTS = {
    "points": [
        *(SchedulePoint(step=10, factor=1.0), SchedulePoint(step=50, factor=0.5)),
        SchedulePoint(fraction=1.0, factor=0.0),
    ]
}


@pytest.mark.parametrize("name", ["cosine", "wsd", "power"])
def test_a_schedule_ends_at_its_final_fraction_exactly(name):
    """As the step computes it: compiled, of a step that the compiler does not know."""
    config = ScheduleConfig(Schedule(name), warmup_steps=100, final_fraction=0.1)
    rate = jax.jit(make_schedule(config, 1600))
    assert float(rate(1599)) > 0.1
    assert [float(rate(step)) for step in (1600, 5000)] == [np.float32(0.1)] * 2


@pytest.mark.parametrize(
    ("name", "extra", "points"),
    [
        ("constant", {}, {0: 0.1, 4: 0.5, 9: 1, 10: 1, 99: 1, 500: 1}),
        ("cosine", {}, {0: 0.1, 9: 1, 10: 1, 55: 0.55, 100: 0.1, 500: 0.1}),
        ("wsd", {}, {0: 0.1, 9: 1, 70: 1, 85: 0.55, 100: 0.1, 500: 0.1}),
        ("wsd", {"decay_steps": 20}, {9: 1, 80: 1, 90: 0.55, 100: 0.1}),
        ("wsd", {"final_fraction": 0.0}, {70: 1, 85: 0.5, 100: 0}),
        ("wsd", {"decay_fraction": 0.5}, {50: 1, 75: 0.55, 100: 0.1}),
        # Linear to zero: the decay takes all steps after the warm-up.
        ("wsd", LINEAR_TO_ZERO, {9: 1, 10: 1, 55: 0.5, 82: 0.2, 100: 0}),
        # 1 - sqrt(x) after a quarter of the decay's steps.
        ("wsd", {"decay_shape": SQRT, "decay_steps": 40}, {60: 1, 70: 0.55, 100: 0.1}),
        # 10 % of the steps until each end; the rate returns to the peak in between.
        (
            *("wsd", {"decay_fraction": 0.1, "earlier_decays": [40]}),
            {36: 1, 38: 0.55, 39: 0.325, 40: 1, 90: 1, 95: 0.55, 100: 0.1},
        ),
        # From step 20 on (step / 20)^-0.5, then linear from there to the end.
        ("power", POWER, {9: 1, 20: 1, 80: 0.5, 90: 0.3, 100: 0.1, 500: 0.1}),
        ("piecewise", POINTS, {0: 0.1, 10: 1, 30: 0.75, 50: 0.5, 75: 0.25, 200: 0}),
    ],
)
def test_schedules_at_known_points(name, extra, points):
    config = ScheduleConfig(**{"name": Schedule[name], "warmup_steps": 10, **extra})
    schedule = make_schedule(config, num_steps=100)
    for step, value in points.items():
        assert float(schedule(jnp.int32(step))) == pytest.approx(value, abs=1e-6), step


@pytest.mark.parametrize(("warmup", "start"), [(100, 100), (84, 84), (83, 84)])
def test_a_decay_that_does_not_fit_behind_the_warm_up_is_shorter(warmup, start):
    """Of 120 steps 30 % are 36, which begin at step 84 at the earliest."""
    config = ScheduleConfig(Schedule.wsd, warmup_steps=warmup, final_fraction=0)
    schedule = make_schedule(config, num_steps=120)
    for step, value in {start: 1, (start + 120) // 2: 0.5, 120: 0, 200: 0}.items():
        assert float(schedule(jnp.int32(step))) == pytest.approx(value, abs=1e-6)
    assert config.decay_start(120) == start
