"""A sweep over learning rates trains the runs that it says it trains."""

from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.rates import Sweep, compile_sweep, prepare, train
from benchmarks.rates_chart import vertex
from tests.fleet import REPOSITORY
from tests.train.conftest import TINY


@pytest.mark.slow
def test_a_run_of_a_sweep_is_a_run_of_the_training_step(tmp_path: Path):
    """The third of three rates and the second of two seeds are compared."""
    text = REPOSITORY / "docs" / "guides"
    keys = (*TINY, f"data.path={text}", f"data.cache_dir={tmp_path}")
    keys = (*keys, "train.num_steps=8", "data.validation=0.1")
    rates = ("optimizer.learning_rate=0.002", "optimizer.learning_rate=0.008")
    sweep = Sweep("tiny", (*keys, rates[0]), (0.5, 1.0, 4.0), seeds=2)
    prepared = prepare(sweep)
    losses = np.array(train(compile_sweep(prepared))["losses"])
    program = prepare(sweep._replace(overrides=(*keys, rates[1]))).program
    state = program.initial_state(1)
    for step in range(8):
        batch = jax.tree.map(lambda x, step=step: x[step, 1], prepared.batches)
        state, _ = program.train_step(state, batch)
    nats = targets = 0.0
    for i in range(len(prepared.validation.inputs)):
        batch = jax.tree.map(lambda x, i=i: x[i], prepared.validation)
        sums = program.eval_step(state.params, batch)
        nats = nats + float(sums[0])
        targets = targets + int(sums[1])
    assert losses[2, 1] == pytest.approx(nats / targets, rel=1e-4)
    other_losses = np.delete(losses.flatten(), 5)
    assert np.abs(other_losses - losses[2, 1]).min() > 1e-3


def test_the_best_factor_is_the_vertex_of_a_parabola():
    factors = [0.5, 1.0, 2.0, 4.0]
    losses = [[(np.log2(f) - 0.7) ** 2 + noise for noise in (-1, 1)] for f in factors]
    factor = vertex({"factors": factors, "losses": losses})
    assert factor == pytest.approx(2**0.7)
