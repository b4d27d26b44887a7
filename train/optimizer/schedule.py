"""The schedule: the factor on learning rates, step by step."""

from collections.abc import Callable

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
    if config.name is Schedule.cosine:
        body = optax.cosine_decay_schedule(1.0, max(1, num_steps - warmup), final)
    elif config.name is Schedule.wsd:
        decay = config.decay_within(num_steps)
        begin = config.falls_from(num_steps) - warmup
        body = optax.linear_schedule(1.0, final, decay, begin)
    else:
        body = optax.constant_schedule(1.0)
    # The first update, at step 0, already moves: (step + 1) / warmup.
    return lambda step: jnp.where(
        step < warmup, (step + 1) / max(1, warmup), body(jnp.maximum(step - warmup, 0))
    )
