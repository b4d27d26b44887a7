"""Rows are sorted by expert, in the order of their tokens."""

import jax
import numpy as np
import pytest

from model.parts.experts.local_experts import sort_rows


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("num_experts", [1, 5])
def test_rows_are_sorted_by_expert_on_every_platform(platform, num_experts):
    rng = np.random.default_rng(0)
    experts = rng.integers(num_experts + 1, size=(30, 4), dtype=np.int32)
    sort = jax.jit(sort_rows, static_argnums=(1, 2))
    row_nk, order, sizes = map(np.asarray, sort(experts, num_experts, platform))
    expected = np.argsort(experts.ravel(), stable=True)
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(row_nk.ravel()[expected], np.arange(120))
    counts = np.bincount(experts.ravel(), minlength=num_experts + 1)
    np.testing.assert_array_equal(sizes, counts[:num_experts])
