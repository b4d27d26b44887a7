"""One update weighs microbatches by targets, and skips spikes and bad values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.batch import Batch
from data.batches import Order
from tests.train.conftest import take_steps
from train.core.rows import split

POISON = 383  # This id is padding: its embedding changes nothing else.


@pytest.fixture(scope="module")
def program(programs):
    return programs(["optimizer.ema_decay=0.9"], devices=1)


@pytest.fixture(scope="module")
def state(program, store):
    """Return a state without zero moments (step 3). One unused embedding is NaN."""
    state, _ = take_steps(program, store, program.init(), 3)
    table = state.params["embedding"]["weight"].at[POISON].set(jnp.nan)
    state.params["embedding"]["weight"] = table
    return jax.device_get(state)


def batch_of(program, store, step: int) -> Batch:
    return jax.tree.map(jnp.asarray, Order(store, program.config.data, 0).read(step))


def assert_equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def test_an_update_that_is_not_finite_is_left_out(program, store, state):
    """One bad batch is counted, and has no effect on anything that comes after."""
    good_batch = batch_of(program, store, 3)
    bad_batch = good_batch._replace(inputs=good_batch.inputs.at[0, 0].set(POISON))
    skipped_state, metrics = program.train_step(
        jax.tree.map(jnp.asarray, state), bad_batch
    )
    assert float(metrics["skipped"]) == 1
    assert not np.isfinite(float(metrics["loss"]))
    assert_equal(skipped_state._replace(step=0), state._replace(step=0))
    assert int(skipped_state.step) == int(state.step) + 1

    expected_state, expected_metrics = program.train_step(
        jax.tree.map(jnp.asarray, state)._replace(step=jnp.int32(4)), good_batch
    )
    assert int(state.step) == 3
    next_state, metrics = program.train_step(skipped_state, good_batch)
    assert float(metrics["skipped"]) == 0
    assert np.isfinite(float(metrics["loss"]))
    assert_equal((next_state, metrics), (expected_state, expected_metrics))


def test_microbatches_weigh_by_their_targets(program, programs, store, state):
    """Half of the rows have few targets, so that a mean of means would differ."""
    baseline = program
    accumulating = programs(
        ["optimizer.ema_decay=0.9", "train.accumulation_steps=2"], devices=1
    )
    batch = batch_of(baseline, store, 0)
    rows = jnp.arange(8)[:, None]
    targets = jnp.where((rows % 2 == 0) & (jnp.arange(32) > 1), -1, batch.targets)
    batch = batch._replace(targets=targets)
    (even_targets, _) = split(batch, 2).targets
    assert int((even_targets >= 0).sum()) < 0.2 * int((targets >= 0).sum())
    (baseline_state, baseline_metrics), (accumulated_state, accumulated_metrics) = (
        p.train_step(jax.tree.map(jnp.asarray, state), batch)
        for p in (baseline, accumulating)
    )
    for key in baseline_metrics:
        assert float(baseline_metrics[key]) == pytest.approx(
            float(accumulated_metrics[key]), rel=1e-5
        )
    moment = jax.device_get(
        [s.optimizer.transform[0].mu for s in (baseline_state, accumulated_state)]
    )
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
    return programs(["train.skip_sigma=4", "train.skip_window=4"], devices=1)


@pytest.fixture(scope="module")
def sixth(guarded, store):
    """Return the state of a guarded run after six accepted steps."""
    state, metrics = take_steps(guarded, store, guarded.init(), 6)
    assert all(row["skipped"] == 0 for row in metrics)
    return jax.device_get(state)


def scale_recent(state, loss: float = 1.0, norm: float = 1.0, num_accepted: int = 6):
    """Scale the recent losses and norms of a state by these factors."""
    values = state.recent.values * np.array([[loss], [norm]], np.float32)
    recent = state.recent._replace(values=values, num_accepted=np.int32(num_accepted))
    return jax.tree.map(jnp.asarray, state._replace(recent=recent))


@pytest.mark.parametrize("smaller", [{"loss": 0.5}, {"norm": 0.2}])
def test_a_spike_of_loss_or_norm_is_skipped_and_not_remembered(
    guarded, store, sixth, smaller
):
    previous = jax.device_get(scale_recent(sixth, **smaller))
    batch = batch_of(guarded, store, 6)
    next_state, metrics = guarded.train_step(scale_recent(sixth, **smaller), batch)
    assert float(metrics["skipped"]) == 1
    assert np.isfinite([float(metrics["loss"]), float(metrics["grad_norm"])]).all()
    assert_equal(next_state._replace(step=0), previous._replace(step=0))
    assert int(next_state.step) == 7


def test_low_values_and_steps_before_half_a_window_are_no_spikes(guarded, store, sixth):
    short_history = scale_recent(sixth, loss=0.5, num_accepted=1)
    for state in (scale_recent(sixth, loss=9.0, norm=9.0), short_history):
        num_accepted = int(state.recent.num_accepted)
        next_state, metrics = guarded.train_step(state, batch_of(guarded, store, 6))
        assert float(metrics["skipped"]) == 0
        assert int(next_state.recent.num_accepted) == num_accepted + 1


def test_values_that_are_not_finite_do_not_enter_the_window(guarded, store, sixth):
    state = jax.tree.map(jnp.asarray, sixth)
    table = state.params["embedding"]["weight"].at[POISON].set(jnp.nan)
    state.params["embedding"]["weight"] = table
    good_batch = batch_of(guarded, store, 6)
    bad_batch = good_batch._replace(inputs=good_batch.inputs.at[0, 0].set(POISON))
    state, metrics = guarded.train_step(state, bad_batch)
    assert float(metrics["skipped"]) == 1
    assert_equal(state.recent, sixth.recent)


def compile_as_users_do(program):
    """Compile the step with the emitters that tests/conftest.py turns off."""
    options = {"xla_cpu_use_fusion_emitters": True}
    lowered = program.train_step.lower(program.state, program.batch)
    return lowered.compile(options if jax.__version_info__ < (0, 11) else None)


@pytest.mark.slow
def test_a_guarded_run_without_spikes_is_the_same_run(program, guarded, store):
    """They are bitwise equal. The average of weights changes nothing either."""
    step, guarded_step = map(compile_as_users_do, (program, guarded))
    state = program.init()
    guarded_state = guarded.init()
    for number in range(6):
        batch = batch_of(program, store, number)
        state, metrics = step(state, batch)
        guarded_state, expected = guarded_step(guarded_state, batch)
        assert_equal(metrics, expected)
    assert_equal(state.params, guarded_state.params)
    assert state.recent is None
