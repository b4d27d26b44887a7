"""Detect spikes on the device: steps far above recent steps in loss or gradient norm.

The loss and the gradient norm of the last accepted steps are kept in a ring buffer. A
skipped step never enters the buffer, so that one bad step does not hide the next.

Source: OLMo-core v2, `optim/skip_step_optimizer.py`, which also detects spikes only
after half a window of steps, but whose buffer includes skipped steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Recent(NamedTuple):
    """The last accepted steps.

    values: float32 [2, window], a ring buffer of losses and gradient norms.
    num_accepted: int32 scalar, the number of accepted steps so far.
    """

    values: jax.Array
    num_accepted: jax.Array


def empty_recent(window: int) -> Recent:
    """Return an empty ring buffer."""
    return Recent(jnp.zeros((2, window), jnp.float32), jnp.zeros((), jnp.int32))


def is_spike(recent: Recent, current: jax.Array, sigma: float) -> jax.Array:
    """Return whether a step is more than sigma standard deviations above the mean.

    `current` is float32 [2], the step's loss and gradient norm. Nothing is a spike
    until `recent` is half full.
    """
    window = recent.values.shape[1]
    is_filled = jnp.arange(window) < recent.num_accepted
    mean = jnp.mean(recent.values, 1, where=is_filled)
    limit = mean + sigma * jnp.std(recent.values, 1, where=is_filled)
    return jnp.any(current > limit) & (2 * recent.num_accepted >= window)


def remember_accepted(recent: Recent, current: jax.Array) -> Recent:
    """Return `recent` with the oldest step replaced by the current step."""
    slot = recent.num_accepted % recent.values.shape[1]
    return Recent(recent.values.at[:, slot].set(current), recent.num_accepted + 1)
