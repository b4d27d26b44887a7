import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig, MixtureSource, Source, WeightChange
from data.mixture import Mixture

NAMES = ["arts", "books", "code", "data", "essays", "forums"]


@st.composite
def mixtures(draw, max_first_row: int = 400):
    """Up to 6 sources, some without weight, with up to 3 changes of weights."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 6))]
    firsts = draw(st.sets(st.integers(1, max_first_row), max_size=3))
    scale = draw(st.sampled_from([1, 10, 100]))
    weight = st.one_of(st.integers(0, 6), st.integers(1, 100))
    weights = st.fixed_dictionaries({name: weight for name in names}).filter(
        lambda chosen: any(chosen.values())
    )
    rows = [0, *sorted(firsts)]
    written = [
        (row, {name: w / scale for name, w in draw(weights).items()}) for row in rows
    ]
    return names, written


@settings(max_examples=400, deadline=None)
@given(mixtures())
def test_each_stretch_keeps_its_shares_within_tijdemans_bound(mixture):
    """Counted from the stretch's own first row, at each of its rows; and all ranks."""
    names, stretches = mixture
    num_rows = 2000
    sources, ranks = Mixture(names, stretches).rows(np.arange(num_rows))
    given_ = np.eye(len(names), dtype=np.int64)[sources]
    before = np.cumsum(given_, axis=0) - given_
    np.testing.assert_array_equal(ranks, before[np.arange(num_rows), sources])
    ends = [*(first for first, _ in stretches[1:]), num_rows]
    for (first, weights), end in zip(stretches, ends, strict=True):
        exact = [Fraction(str(weights[name])) for name in names]
        shares = [weight / sum(exact) for weight in exact]
        one = math.lcm(*(share.denominator for share in shares))
        units = np.array([int(share * one) for share in shares])
        due = units * np.arange(1, end - first + 1)[:, None]
        counts = np.cumsum(given_[first:end], axis=0)
        bound = one - one / max(1, 2 * len(names) - 2)
        assert np.abs(due - counts * one).max() <= bound < one
        assert not counts[:, units == 0].any(), "a source without weight gave a row"


@settings(max_examples=50, deadline=None)
@given(mixtures(), st.lists(st.integers(0, 1999), max_size=64))
def test_any_rows_in_any_order_are_those_of_the_sequence(mixture, numbers):
    order = Mixture(*mixture)
    sources, ranks = order.rows(np.arange(2000))
    some = order.rows(np.array(numbers, np.int64))
    np.testing.assert_array_equal(some[0], sources[numbers])
    np.testing.assert_array_equal(some[1], ranks[numbers])
    for number in numbers:
        expected = np.bincount(sources[:number], minlength=len(mixture[0]))
        np.testing.assert_array_equal(order.counts(number), expected)
    assert {array.dtype for array in (*some, order.counts(5))} == {np.dtype(np.int64)}


@settings(max_examples=50, deadline=None)
@given(mixtures())
def test_a_change_of_weights_moves_no_row_before_it(mixture):
    names, stretches = mixture
    numbers = np.arange(stretches[-1][0])
    for left, right in zip(
        Mixture(names, stretches).rows(numbers),
        Mixture(names, stretches[:-1] or stretches).rows(numbers),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


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
    for left, right in zip(
        order.rows(np.arange(300)), in_percent.rows(np.arange(300)), strict=True
    ):
        np.testing.assert_array_equal(left, right)


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
def test_a_config_lists_the_weights_that_cannot_be_tabled(weights, key):
    first, *later = (dict(zip("abc", map(float, w), strict=True)) for w in weights)
    sources = {name: MixtureSource("x", weight) for name, weight in first.items()}
    changes = [WeightChange(9 * n, given) for n, given in enumerate(later, 1)]
    config = DataConfig(source=Source.mixture, sources=sources, weight_changes=changes)
    if key is None:
        assert config.mistakes() == []
        return
    ((found, value, rule),) = config.mistakes()
    assert (found, value) == (key, [first, *later][-1])
    assert rule.startswith(f"at step {9 * len(later)} repeat only after ")
    assert rule.endswith("round them to fewer digits")
