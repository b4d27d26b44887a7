"""The schedule: the factor on learning rates at each step."""

from collections.abc import Callable
from typing import assert_never

import jax
import jax.numpy as jnp
import optax

from train.config import Schedule, ScheduleConfig


def make_schedule(
    config: ScheduleConfig, num_steps: int
) -> Callable[[jax.Array], jax.Array]:
    """Return the factor on learning rates as a function of the step. Its peak is 1.

    After a linear warm-up, `constant` stays at 1, `cosine` falls to the final fraction
    at num_steps, and `wsd` stays at 1 and falls linearly over the last steps.
    """
    warmup, final = config.warmup_steps, config.final_fraction
    match config.name:
        case Schedule.cosine:
            body = optax.cosine_decay_schedule(1.0, max(1, num_steps - warmup), final)
        case Schedule.wsd:
            decay_start = config.decay_start(num_steps) - warmup
            body = _linear_decay(decay_start, config.num_decay_steps(num_steps), final)
        case Schedule.constant:
            body = optax.constant_schedule(1.0)
        case _:
            assert_never(config.name)
    # The first update, at step 0, already has a positive rate: (step + 1) / warmup.
    return lambda step: jnp.where(
        step < warmup, (step + 1) / max(1, warmup), body(jnp.maximum(step - warmup, 0))
    )


def _linear_decay(
    decay_start: int, decay_steps: int, final: float
) -> Callable[[jax.Array], jax.Array]:
    """Return a factor that falls linearly from 1 to exactly the final fraction."""

    def factor(step: jax.Array) -> jax.Array:
        fraction = jnp.maximum(step - decay_start, 0) / max(1, decay_steps)
        decayed = 1.0 - (1.0 - final) * fraction
        return jnp.where(step < decay_start + decay_steps, decayed, final)

    return factor
