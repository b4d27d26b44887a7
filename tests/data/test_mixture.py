import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig, MixtureSource, Source, WeightChange
from data.config_rules import data_mistakes
from data.mixture import Mixture

NAMES = ["arts", "books", "code", "data", "essays", "forums"]


@st.composite
def mixtures(draw, max_first_row: int = 400):
    """Draw up to 6 sources, some without weight, and up to 3 changes of weights."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 6))]
    firsts = draw(st.sets(st.integers(1, max_first_row), max_size=3))
    scale = draw(st.sampled_from([1, 10, 100]))
    weight = st.one_of(st.integers(0, 6), st.integers(1, 100))
    weights = st.fixed_dictionaries({name: weight for name in names}).filter(
        lambda candidate: any(candidate.values())
    )
    rows = [0, *sorted(firsts)]
    stretches = [
        (row, {name: w / scale for name, w in draw(weights).items()}) for row in rows
    ]
    return names, stretches


@settings(max_examples=400, deadline=None)
@given(mixtures())
def test_each_stretch_keeps_its_shares_within_tijdemans_bound(mixture):
    """The bound holds at each row, counted from the first row of the stretch.

    A rank is the number of earlier rows of the same source.
    """
    names, stretches = mixture
    num_rows = 2000
    sources, ranks = Mixture(names, stretches).rows(np.arange(num_rows))
    one_hot = np.eye(len(names), dtype=np.int64)[sources]
    earlier_rows = np.cumsum(one_hot, axis=0) - one_hot
    np.testing.assert_array_equal(ranks, earlier_rows[np.arange(num_rows), sources])
    ends = [*(first for first, _ in stretches[1:]), num_rows]
    for (first, weights), end in zip(stretches, ends, strict=True):
        exact = [Fraction(str(weights[name])) for name in names]
        shares = [weight / sum(exact) for weight in exact]
        denominator = math.lcm(*(share.denominator for share in shares))
        units = np.array([int(share * denominator) for share in shares])
        due = units * np.arange(1, end - first + 1)[:, None]
        counts = np.cumsum(one_hot[first:end], axis=0)
        bound = denominator - denominator / max(1, 2 * len(names) - 2)
        assert np.abs(due - counts * denominator).max() <= bound < denominator
        assert not counts[:, units == 0].any(), "a source without weight gave a row"


@settings(max_examples=50, deadline=None)
@given(mixtures(), st.lists(st.integers(0, 1999), max_size=64))
def test_any_rows_in_any_order_are_those_of_the_sequence(mixture, numbers):
    order = Mixture(*mixture)
    sources, ranks = order.rows(np.arange(2000))
    subset = order.rows(np.array(numbers, np.int64))
    np.testing.assert_array_equal(subset[0], sources[numbers])
    np.testing.assert_array_equal(subset[1], ranks[numbers])
    for number in numbers:
        expected = np.bincount(sources[:number], minlength=len(mixture[0]))
        np.testing.assert_array_equal(order.counts(number), expected)
    assert {array.dtype for array in (*subset, order.counts(5))} == {np.dtype(np.int64)}


@settings(max_examples=50, deadline=None)
@given(mixtures())
def test_a_change_of_weights_moves_no_row_before_it(mixture):
    names, stretches = mixture
    numbers = np.arange(stretches[-1][0])
    for actual, expected in zip(
        Mixture(names, stretches).rows(numbers),
        Mixture(names, stretches[:-1] or stretches).rows(numbers),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)


def test_the_order_is_the_one_that_existing_runs_trained_on():
    order = Mixture(["c", "a", "b"], [(0, {"a": 0.61, "b": 0.23, "c": 0.16})])
    sources, ranks = order.rows(np.arange(1000))
    assert sources[:12].tolist() == [1, 2, 1, 1, 0, 1, 1, 2, 1, 0, 1, 2]
    digest = hashlib.sha256(sources.tobytes() + ranks.tobytes()).hexdigest()
    assert digest[:16] == "b6c68924371a2431"


def test_weights_are_the_decimals_that_were_written():
    names = ["a", "b", "c"]
    order = Mixture(names, [(0, {"a": 0.61, "b": 0.23, "c": 0.16})])
    assert order.counts(100).tolist() == [61, 23, 16]
    assert order.counts(10**11).tolist() == [61 * 10**9, 23 * 10**9, 16 * 10**9]
    in_percent = Mixture(names, [(0, {"a": 61, "b": 23, "c": 16})])
    for actual, expected in zip(
        order.rows(np.arange(300)), in_percent.rows(np.arange(300)), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("weights", "key"),
    [
        ([(812345677, 123456789, 0)], "sources"),
        ([(0.5, 0.25, 0.333333)], "sources"),
        ([(1, 1, 1), (0.5, 0.25, 0.333333)], "weight_changes"),
        ([(1, 1, 1), (1, 2, 0), (812345677, 123456789, 0)], "weight_changes"),
        ([(0.33, 0.33, 0.34), (1048575, 1, 0)], None),
    ],
)
def test_weights_with_too_long_a_period_are_mistakes_of_the_config(weights, key):
    first, *later = (dict(zip("abc", map(float, w), strict=True)) for w in weights)
    sources = {name: MixtureSource("x", weight) for name, weight in first.items()}
    changes = [WeightChange(9 * n, shares) for n, shares in enumerate(later, 1)]
    config = DataConfig(source=Source.mixture, sources=sources, weight_changes=changes)
    if key is None:
        assert not [*data_mistakes(config)]
        return
    (mistake,) = data_mistakes(config)
    assert (mistake.key, mistake.value) == (f"data.{key}", [first, *later][-1])
    assert mistake.rule.startswith(f"at step {9 * len(later)} repeat only after ")
    assert mistake.rule.endswith("round them to fewer digits")
