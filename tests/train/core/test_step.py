"""One update: microbatches, and the guard against spikes and what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.batch import Batch
from data.batches import Order
from tests.train.conftest import take_steps
from train.core.rows import split

POISON = 383  # an id of the padding: its embedding changes nothing else


@pytest.fixture(scope="module")
def program(programs):
    return programs("optimizer.ema_decay=0.9", devices=1)


@pytest.fixture(scope="module")
def state(program, store):
    """After three steps, so that no moment is zero; one unused embedding is NaN."""
    state, _ = take_steps(program, store, program.init(), 3)
    table = state.params["embedding"]["weight"].at[POISON].set(jnp.nan)
    state.params["embedding"]["weight"] = table
    return jax.device_get(state)


def batch_of(program, store, step: int) -> Batch:
    return jax.tree.map(jnp.asarray, Order(store, program.config.data, 0).read(step))


def same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def test_an_update_that_is_not_finite_is_left_out(program, store, state):
    """One poisoned batch: counted, and of no effect on anything that comes after."""
    good = batch_of(program, store, 3)
    bad = good._replace(inputs=good.inputs.at[0, 0].set(POISON))
    after, metrics = program.train_step(jax.tree.map(jnp.asarray, state), bad)
    assert float(metrics["skipped"]) == 1
    assert not np.isfinite(float(metrics["loss"]))
    same(after._replace(step=0), state._replace(step=0))
    assert int(after.step) == int(state.step) + 1

    direct, clean = program.train_step(
        jax.tree.map(jnp.asarray, state)._replace(step=jnp.int32(4)), good
    )
    assert int(state.step) == 3
    later, metrics = program.train_step(after, good)
    assert float(metrics["skipped"]) == 0
    assert np.isfinite(float(metrics["loss"]))
    same((later, metrics), (direct, clean))


def test_microbatches_weigh_by_their_targets(program, programs, store, state):
    """Half of the rows have next to no targets: a mean of means would be another."""
    whole = program
    parts = programs("optimizer.ema_decay=0.9", "train.accumulation_steps=2", devices=1)
    batch = batch_of(whole, store, 0)
    rows = jnp.arange(8)[:, None]
    few = jnp.where((rows % 2 == 0) & (jnp.arange(32) > 1), -1, batch.targets)
    batch = batch._replace(targets=few)
    (even, _) = split(batch, 2).targets
    assert int((even >= 0).sum()) < 0.2 * int((few >= 0).sum())
    (one, a), (two, b) = (
        p.train_step(jax.tree.map(jnp.asarray, state), batch) for p in (whole, parts)
    )
    for key in a:
        assert float(a[key]) == pytest.approx(float(b[key]), rel=1e-5)
    moment = jax.device_get([s.optimizer.transform[0].mu for s in (one, two)])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7), *moment
    )


def test_a_batch_without_targets_is_no_division_by_zero(program, store, state):
    batch = batch_of(program, store, 0)
    batch = batch._replace(targets=jnp.full_like(batch.targets, -1))
    _, metrics = program.train_step(jax.tree.map(jnp.asarray, state), batch)
    assert float(metrics["loss"]) == 0
    assert float(metrics["skipped"]) == 0


@pytest.fixture(scope="module")
def guarded(programs):
    return programs("train.skip_sigma=4", "train.skip_window=4", devices=1)


@pytest.fixture(scope="module")
def sixth(guarded, store):
    """The state of a guarded run after six steps, all of them accepted."""
    state, metrics = take_steps(guarded, store, guarded.init(), 6)
    assert all(found["skipped"] == 0 for found in metrics)
    return jax.device_get(state)


def seen(state, loss: float = 1.0, norm: float = 1.0, num_accepted: int = 6):
    """Let it be that losses and norms were so much smaller or greater lately."""
    values = state.recent.values * np.array([[loss], [norm]], np.float32)
    recent = state.recent._replace(values=values, num_accepted=np.int32(num_accepted))
    return jax.tree.map(jnp.asarray, state._replace(recent=recent))


@pytest.mark.parametrize("smaller", [{"loss": 0.5}, {"norm": 0.2}])
def test_a_spike_of_either_is_left_out_and_not_remembered(
    guarded, store, sixth, smaller
):
    before = jax.device_get(seen(sixth, **smaller))
    batch = batch_of(guarded, store, 6)
    after, metrics = guarded.train_step(seen(sixth, **smaller), batch)
    assert float(metrics["skipped"]) == 1
    assert np.isfinite([float(metrics["loss"]), float(metrics["grad_norm"])]).all()
    same(after._replace(step=0), before._replace(step=0))
    assert int(after.step) == 7


def test_far_below_is_no_spike_nor_is_anything_before_half_a_window(
    guarded, store, sixth
):
    few = seen(sixth, loss=0.5, num_accepted=1)
    for state in (seen(sixth, loss=9.0, norm=9.0), few):
        before = int(state.recent.num_accepted)
        after, metrics = guarded.train_step(state, batch_of(guarded, store, 6))
        assert float(metrics["skipped"]) == 0
        assert int(after.recent.num_accepted) == before + 1


def test_what_is_not_finite_does_not_enter_the_window(guarded, store, sixth):
    state = jax.tree.map(jnp.asarray, sixth)
    table = state.params["embedding"]["weight"].at[POISON].set(jnp.nan)
    state.params["embedding"]["weight"] = table
    good = batch_of(guarded, store, 6)
    bad = good._replace(inputs=good.inputs.at[0, 0].set(POISON))
    state, metrics = guarded.train_step(state, bad)
    assert float(metrics["skipped"]) == 1
    same(state.recent, sixth.recent)


def as_users_compile(program):
    """Compile its step with the emitters that tests else spare (tests/conftest.py)."""
    spared = {"xla_cpu_use_fusion_emitters": True}
    lowered = program.train_step.lower(program.state, program.batch)
    return lowered.compile(spared if jax.__version_info__ < (0, 11) else None)


@pytest.mark.slow
def test_a_guarded_run_without_spikes_is_the_same_run(program, guarded, store):
    """To the bit; the average of weights changes nothing either."""
    step, guarded_step = map(as_users_compile, (program, guarded))
    state = program.init()
    other = guarded.init()
    for number in range(6):
        batch = batch_of(program, store, number)
        state, metrics = step(state, batch)
        other, expected = guarded_step(other, batch)
        same(metrics, expected)
    same(state.params, other.params)
    assert state.recent is None
