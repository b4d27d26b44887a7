"""The ring of recent steps and what is a spike, against the definition."""

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
def judge(recent, now):
    """Judge a step, and give the ring with it."""
    return is_spike(recent, now, SIGMA), remember_accepted(recent, now)


whole = st.integers(0, 50)  # then no two roundings of a limit disagree on a step


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(whole, whole), max_size=40))
def test_a_step_is_judged_by_the_last_accepted_ones(steps):
    accepted = []
    recent = empty_recent(WINDOW)
    for step in steps:
        spike, with_it = judge(recent, jnp.array(step, jnp.float32))
        last = accepted[-WINDOW:]
        above = []
        for now, known in zip(step, zip(*last, strict=True), strict=False):
            limit = statistics.fmean(known) + SIGMA * statistics.pstdev(known)
            if abs(now - limit) < 1e-3:  # rounding decides
                return
            above.append(now > limit)
        assert bool(spike) == (len(last) >= WINDOW / 2 and any(above))
        if not spike:
            accepted.append(step)
            recent = with_it
    assert int(recent.num_accepted) == len(accepted)
    last = sorted(zip(*np.asarray(recent.values).tolist(), strict=True))
    padding = [(0, 0)] * (WINDOW - len(accepted))
    assert last == sorted([*accepted[-WINDOW:], *padding])
