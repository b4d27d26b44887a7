"""The schedule: the factor on learning rates, step by step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from train.config import Schedule, ScheduleConfig


def factor(config: ScheduleConfig, num_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Return the schedule as a function of the step, 1 at its peak.

    Linear warm-up, then: `constant`; `cosine` down to the final fraction at num_steps;
    `wsd` level, then linear down over the last `decay_steps` (null: 30 %).
    """
    warmup, final = config.warmup_steps, config.final_fraction
    level = optax.constant_schedule(1.0)
    if config.name is Schedule.cosine:
        body = optax.cosine_decay_schedule(1.0, max(1, num_steps - warmup), final)
    elif config.name is Schedule.wsd:
        decay = config.decay_steps or max(1, round(0.3 * num_steps))
        down = optax.linear_schedule(1.0, final, decay)
        body = optax.join_schedules([level, down], [max(0, num_steps - decay - warmup)])
    else:
        body = level
    # The first update, at step 0, already moves: (step + 1) / warmup.
    return lambda step: jnp.where(
        step < warmup, (step + 1) / max(1, warmup), body(jnp.maximum(step - warmup, 0))
    )
