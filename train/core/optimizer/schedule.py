"""The schedule: the factor on learning rates at each step.

Sources: arXiv:2405.18392 (decays, and the shape 1 - sqrt), arXiv:2410.05192 (a run that
decays and rises again), arXiv:2408.13359 (power).
"""

from collections.abc import Callable
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import optax

from train.config import DecayShape, Schedule, ScheduleConfig

Factor = Callable[[jax.Array], jax.Array]


def make_schedule(config: ScheduleConfig, num_steps: int, peak: float = 1.0) -> Factor:
    """Return the factor on learning rates, times `peak`, as a function of the step.

    `config` has no numbers of tokens: see `ScheduleConfig.in_steps`.

    After a linear warm-up, `constant` stays at 1, `cosine` falls to the final fraction
    at num_steps, and `piecewise` connects points. `wsd` stays at 1 and `power` falls
    slowly, until both decay to the final fraction at num_steps.
    """
    warmup = config.warmup_steps
    final = config.final_fraction
    own = config.own_body(num_steps)
    match config.name:
        case _ if own is not None:
            body = _after(warmup, own)
        case Schedule.cosine:
            body = optax.cosine_decay_schedule(1.0, max(1, num_steps - warmup), final)
            body = _after(warmup, body)
        case Schedule.wsd | Schedule.power:
            body = _with_decays(config, num_steps)
        case Schedule.piecewise:
            body = _piecewise(config, num_steps)
        case Schedule.constant:
            body = optax.constant_schedule(1.0)
        case _:
            assert_never(config.name)

    def factor(step: jax.Array) -> jax.Array:
        # The first update, at step 0, already has a positive rate.
        value = jnp.where(step < warmup, (step + 1) / max(1, warmup), body(step))
        return value if peak == 1 else peak * value

    return factor


def _after(warmup: int, body: Callable[[jax.Array], Any]) -> Factor:
    """Return a function that counts the steps of `body` from the end of the warm-up."""
    return lambda step: body(jnp.maximum(step - warmup, 0))


def _with_decays(config: ScheduleConfig, num_steps: int) -> Factor:
    """Return a factor that decays once or several times, at last to the final fraction.

    The factor is exactly the final fraction from num_steps on.
    """
    final = config.final_fraction

    def level(step: jax.Array | int) -> jax.Array | float:
        if config.name is Schedule.wsd:
            return 1.0
        start = config.power_start_step or max(1, config.warmup_steps)
        return (jnp.maximum(step, start) / start) ** -config.power_exponent

    def factor(step: jax.Array) -> jax.Array:
        value = level(step)
        stop = num_steps
        for start, stop in config.decays(num_steps):
            fraction = jnp.maximum(step - start, 0) / max(1, stop - start)
            if config.decay_shape is DecayShape.sqrt:
                fraction = jnp.sqrt(fraction)
            decayed = level(start) - (level(start) - final) * fraction
            value = jnp.where((start <= step) & (step < stop), decayed, value)
        return jnp.where(step < stop, value, final)

    return factor


def _piecewise(config: ScheduleConfig, num_steps: int) -> Factor:
    """Return a factor that is linear between points, and constant after the last."""
    steps, factors = zip(*config.piecewise_points(num_steps), strict=True)

    def factor(step: jax.Array) -> jax.Array:
        value = jnp.interp(step, jnp.array(steps), jnp.array(factors))
        # `interp` returns the factor of the last point only up to rounding.
        return jnp.where(step < steps[-1], value, factors[-1])

    return factor
