"""The ring of recent steps and the judgement of spikes follow the definition."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from train.core.spikes import empty_recent, is_spike, remember_accepted

WINDOW = 6
SIGMA = 2.0


@jax.jit
def judge(recent, current):
    """Return whether a step is a spike, and the ring with the step added."""
    return is_spike(recent, current, SIGMA), remember_accepted(recent, current)


integers = st.integers(0, 50)  # No rounding of a limit changes a verdict.


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(integers, integers), max_size=40))
def test_a_step_is_judged_by_the_last_accepted_ones(steps):
    accepted_steps = []
    recent = empty_recent(WINDOW)
    for step in steps:
        spike, next_recent = judge(recent, jnp.array(step, jnp.float32))
        last = accepted_steps[-WINDOW:]
        exceeds = []
        for value, history in zip(step, zip(*last, strict=True), strict=False):
            limit = statistics.fmean(history) + SIGMA * statistics.pstdev(history)
            if abs(value - limit) < 1e-3:  # Rounding decides.
                return
            exceeds.append(value > limit)
        assert bool(spike) == (len(last) >= WINDOW / 2 and any(exceeds))
        if not spike:
            accepted_steps.append(step)
            recent = next_recent
    assert int(recent.num_accepted) == len(accepted_steps)
    last = sorted(zip(*np.asarray(recent.values).tolist(), strict=True))
    padding = [(0, 0)] * (WINDOW - len(accepted_steps))
    assert last == sorted([*accepted_steps[-WINDOW:], *padding])
