import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.mixture import Mixture

NAMES = ["arts", "books", "code", "data", "essays", "forums"]


@st.composite
def mixtures(draw, max_first_row: int = 400, zero: bool = True):
    """Up to 6 sources with up to 3 changes of weights; zero: some may have none."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 6))]
    firsts = draw(st.sets(st.integers(1, max_first_row), max_size=3))
    scale = draw(st.sampled_from([1, 10, 100]))
    weight = st.one_of(st.integers(0 if zero else 1, 6), st.integers(1, 100))
    weights = st.fixed_dictionaries({name: weight for name in names}).filter(
        lambda chosen: any(chosen.values())
    )
    rows = [0, *sorted(firsts)]
    written = [
        (row, {name: w / scale for name, w in draw(weights).items()}) for row in rows
    ]
    return names, written


def shares_and_counts(names, stretches, num_rows):
    """Every source's share and count after each row, in units of 1/scale of a row."""
    sources, ranks = Mixture(names, stretches).rows(np.arange(num_rows))
    exact = []
    for _, weights in stretches:
        written = [Fraction(str(weights.get(name, 0))) for name in names]
        exact.append([weight / sum(written) for weight in written])
    scale = math.lcm(*(weight.denominator for row in exact for weight in row))
    assert scale * num_rows < 2**62
    table = np.array([[int(weight * scale) for weight in row] for row in exact])
    firsts = [first for first, _ in stretches]
    in_force = table[np.searchsorted(firsts, np.arange(num_rows), "right") - 1]
    given_ = np.eye(len(names), dtype=np.int64)[sources]
    counts = np.cumsum(given_, axis=0)
    np.testing.assert_array_equal(
        ranks, (counts - given_)[np.arange(num_rows), sources], "ranks have a gap"
    )
    return np.cumsum(in_force, axis=0), counts, scale, in_force, sources


@settings(max_examples=400, deadline=None)
@given(mixtures())
def test_counts_stay_within_a_row_of_the_shares(mixture):
    names, stretches = mixture
    shares, counts, scale, _, _ = shares_and_counts(names, stretches, 2000)
    owed = shares - counts * scale
    assert np.abs(owed).max() < scale
    assert owed.max() <= scale - scale / max(1, 2 * len(names) - 2), "Tijdeman's bound"


@settings(max_examples=400, deadline=None)
@given(mixtures(max_first_row=40, zero=False))
def test_tijdemans_bound_holds_both_ways_where_all_are_in_use(mixture):
    names, stretches = mixture
    shares, counts, scale, _, _ = shares_and_counts(names, stretches, 400)
    bound = scale - scale / max(1, 2 * len(names) - 2)
    assert np.abs(shares - counts * scale).max() <= bound


@pytest.mark.parametrize(
    "stretches",
    [
        # The last cycle of the second stretch must look ahead into the third.
        [(0, (5, 4, 4)), (1, (3, 2, 2)), (22, (1, 8, 8))],
        # Sources out of use for a while must be given what they are owed in time.
        [
            (0, (1, 0, 31, 17, 1)),
            (16, (0, 0, 0, 2, 1)),
            (18, (1, 19, 2, 0, 1)),
            (24, (0, 0, 0, 1, 1)),
            (28, (31, 0, 1, 0, 0)),
        ],
    ],
)
def test_deadlines_are_those_of_the_weights_ahead(stretches):
    names = NAMES[: len(stretches[0][1])]
    named = [(first, dict(zip(names, w, strict=True))) for first, w in stretches]
    shares, counts, scale, _, _ = shares_and_counts(names, named, 100)
    owed = shares - counts * scale
    assert owed.max() <= scale - scale / (2 * len(names) - 2)
    assert owed.min() > -scale


@settings(max_examples=200, deadline=None)
@given(mixtures())
def test_a_source_without_weight_gives_at_most_a_row_that_it_is_owed(mixture):
    names, stretches = mixture
    shares, counts, scale, weights, sources = shares_and_counts(names, stretches, 1000)
    rows = np.arange(1000)
    unused = np.flatnonzero(weights[rows, sources] == 0)
    before = shares[unused, sources[unused]] - (
        (counts[unused, sources[unused]] - 1) * scale
    )
    assert (before > 0).all()


def test_a_dropped_source_gives_no_further_row():
    before, after = {"a": 0.61, "b": 0.23, "c": 0.16}, {"b": 0.4, "c": 0.6}
    for dropped in range(1, 200):
        order = Mixture(["a", "b", "c"], [(0, before), (dropped, after)])
        sources, _ = order.rows(np.arange(1000))
        assert (sources[dropped:] != 0).all(), dropped


def test_what_sources_dropped_together_are_owed_is_not_lost():
    """After 4 of 8 rows the first 4 are ahead: two of them alone cannot go on."""
    names = list("abcdefgh")
    stretches = [(0, dict.fromkeys(names, 1)), (4, {"a": 1, "b": 1})]
    shares, counts, scale, _, sources = shares_and_counts(names, stretches, 100)
    assert np.abs(shares - counts * scale).max() < scale
    assert (sources[4:] > 1).sum() == 1


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


@settings(max_examples=25, deadline=None)
@given(mixtures(max_first_row=1500))
def test_skipping_whole_cycles_changes_nothing(mixture):
    """Cut the stretches so short, by changes to the same, that nothing repeats."""
    names, stretches = mixture
    cut = []
    ends = [first for first, _ in stretches[1:]] + [2000]
    for (first, weights), end in zip(stretches, ends, strict=True):
        cut += [(row, weights) for row in range(first, end, 3)]
    numbers = np.arange(2000)
    for left, right in zip(
        Mixture(names, stretches).rows(numbers),
        Mixture(names, [*cut, (2000, stretches[-1][1])]).rows(numbers),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


@settings(max_examples=50, deadline=None)
@given(mixtures())
def test_the_sequence_of_the_names_decides_nothing(mixture):
    names, stretches = mixture
    numbers = np.arange(500)
    there, ranks = Mixture(names, stretches).rows(numbers)
    back, ranks_back = Mixture(names[::-1], stretches).rows(numbers)
    np.testing.assert_array_equal(len(names) - 1 - there, back)
    np.testing.assert_array_equal(ranks, ranks_back)


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


def test_a_far_row_and_a_far_change_cost_no_more():
    started = time.monotonic()
    change = 10**9 + 7
    thirds = {"a": 1, "b": 2}
    order = Mixture(["a", "b"], [(0, {"a": 0.61, "b": 0.39}), (change, thirds)])
    around = np.arange(change - 1000, change + 1000)
    sources, ranks = order.rows(around)
    for source in (0, 1):
        found = ranks[sources == source]
        assert found.tolist() == list(range(found[0], found[0] + len(found)))
    given_before = order.counts(change)
    assert given_before.sum() == change
    assert abs(given_before[0] - Fraction(61, 100) * change) < 1
    later = order.counts(change + 3 * 10**12) - given_before
    assert abs(later[0] - 10**12) <= 1
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    ("stretches", "message"),
    [
        ([(0, {"a": 0.1234567, "b": 0.7654321})], "0.1234567.*fewer digits"),
        ([(0, {"a": 1}), (5, {"a": 0.33333333, "b": 1})], "0.33333333.*fewer digits"),
        ([], "start at row 0"),
        ([(1, {"a": 1})], "start at row 0"),
        ([(0, {"a": 1}), (9, {"b": 1}), (5, {"a": 1})], "sort them"),
        ([(0, {"a": 1}), (0, {"b": 1})], "each row once"),
        ([(0, {"a": 1, "z": 1})], r"name \['z'\]"),
        ([(0, {"a": -1, "b": 2})], "at least 0"),
        ([(0, {"a": math.nan})], "at least 0"),
        ([(0, {"a": math.inf})], "finite"),
        ([(0, {"a": 0})], "one above 0"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(stretches, message):
    with pytest.raises(ValueError, match=message):
        Mixture(["a", "b"], stretches)
