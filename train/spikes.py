"""Loss spikes: steps far above the recent ones, found on the device.

The loss and the gradient norm of the last accepted steps are kept in a ring. A step
that was left out never enters it, so that one bad step does not hide the next.

Source: OLMo-core v2, `optim/skip_step_optimizer.py`, which judges likewise from half
a window on, but keeps the values of the steps that it leaves out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Recent(NamedTuple):
    """The last accepted steps.

    values: float32 [2, window], loss and gradient norm of each; a ring.
    num_accepted: int32 scalar, steps that ever entered it.
    """

    values: jax.Array
    num_accepted: jax.Array


def no_steps(window: int) -> Recent:
    """Start with an empty ring."""
    return Recent(jnp.zeros((2, window), jnp.float32), jnp.zeros((), jnp.int32))


def is_spike(recent: Recent, now: jax.Array, sigma: float) -> jax.Array:
    """Return whether a step lies more than sigma standard deviations above the mean.

    Args:
        recent: at least half full, else nothing is a spike.
        now: float32 [2], the step's loss and gradient norm.
        sigma: `train.skip_sigma`.
    """
    window = recent.values.shape[1]
    filled = jnp.arange(window) < recent.num_accepted
    mean = jnp.mean(recent.values, 1, where=filled)
    limit = mean + sigma * jnp.std(recent.values, 1, where=filled)
    return jnp.any(now > limit) & (2 * recent.num_accepted >= window)


def remember_accepted(recent: Recent, now: jax.Array) -> Recent:
    """Replace the oldest step by this one."""
    place = recent.num_accepted % recent.values.shape[1]
    return Recent(recent.values.at[:, place].set(now), recent.num_accepted + 1)
