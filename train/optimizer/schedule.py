"""The schedule: the factor on learning rates, step by step."""

from collections.abc import Callable
from typing import assert_never

import jax
import jax.numpy as jnp
import optax

from train.config import Schedule, ScheduleConfig


def factor(config: ScheduleConfig, num_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Return the schedule as a function of the step, 1 at its peak.

    Linear warm-up, then: `constant`; `cosine` down to the final fraction at num_steps;
    `wsd` level, then linear down over the last steps, to the final fraction too.
    """
    warmup, final = config.warmup_steps, config.final_fraction
    match config.name:
        case Schedule.cosine:
            body = optax.cosine_decay_schedule(1.0, max(1, num_steps - warmup), final)
        case Schedule.wsd:
            begin = config.falls_from(num_steps) - warmup
            body = _falling(begin, config.decay_within(num_steps), final)
        case Schedule.constant:
            body = optax.constant_schedule(1.0)
        case _:
            assert_never(config.name)
    # The first update, at step 0, already moves: (step + 1) / warmup.
    return lambda step: jnp.where(
        step < warmup, (step + 1) / max(1, warmup), body(jnp.maximum(step - warmup, 0))
    )


def _falling(begin: int, decay: int, final: float) -> Callable[[jax.Array], jax.Array]:
    """Return a factor of 1 that falls in `decay` steps to exactly the final one."""

    def factor(step: jax.Array) -> jax.Array:
        part = jnp.maximum(step - begin, 0) / max(1, decay)
        return jnp.where(step < begin + decay, 1.0 - (1.0 - final) * part, final)

    return factor
