"""Random rounding is unbiased and depends only on seed, step, name and index."""

import jax
import jax.numpy as jnp
import numpy as np

from train.core.optimizer.rounding import (
    entry_ids,
    key_of_step,
    random_bits,
    to_bfloat16,
)

NUMBERS = np.array([1.001, -3.1415927, 0.1, 1e-30, -1e30, 2e-38, 65537.0, 0.0], "f4")


def test_the_mean_of_many_roundings_is_the_number():
    """The test takes 4,096 draws. Rounding to nearest may be off by half a step."""
    keys = jax.vmap(lambda step: key_of_step(0, step))(jnp.arange(4096))
    bits = jax.vmap(lambda key: random_bits(key, "w", NUMBERS.shape))(keys)
    samples = jax.vmap(to_bfloat16, (None, 0))(jnp.array(NUMBERS), bits)
    samples = np.asarray(samples, np.float64)
    step = samples.max(axis=0) - samples.min(axis=0)
    assert (step <= 2.0**-7 * np.abs(NUMBERS)).all()
    bias = np.abs(samples.mean(axis=0) - NUMBERS.astype(np.float64))
    assert (bias <= 4 * 0.5 * step / 4096**0.5).all()
    assert (step[:3] > 0).all()


def test_a_bfloat16_value_is_not_changed():
    values = jnp.array([1.5, -2.0, 0.0, jnp.inf, -jnp.inf, jnp.nan, 3e38], jnp.bfloat16)
    full = jnp.full(values.shape, 0xFFFF, jnp.uint32)
    rounded = to_bfloat16(values.astype(jnp.float32), full)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(*(np.asarray(x, "f4") for x in (rounded, values)))


def test_bits_differ_by_seed_step_name_and_index():
    samples = [
        np.asarray(random_bits(key_of_step(seed, step), name, (64, 64)))
        for seed, step, name in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]
    ]
    for bits in samples:
        low = (bits & 0xFFFF).ravel() / 2**16
        assert abs(low.mean() - 0.5) < 4 * 12**-0.5 / 64
        assert abs(np.corrcoef(low[1:], low[:-1])[0, 1]) < 4 / 64
    for i, first in enumerate(samples):
        for second in samples[:i]:
            assert (first == second).mean() < 1e-3
    assert len(np.unique(entry_ids((3, 5, 64, 64)))) == 3 * 5 * 64 * 64
