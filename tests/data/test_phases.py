"""Batches whose shape changes are still consecutive rows of one order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Batch
from data.batches import Order
from data.catalog import text_store
from data.config import BatchChange, DataConfig, LengthChange
from data.config_rules import data_mistakes
from data.excerpts import excerpts
from data.phases import Phase, batch_number, phase_at, phases_of, tokens_before
from data.sources import open_sources

CONFIG = DataConfig(batch_size=4, sequence_length=16)


def rows_from(step: int, rows: int) -> BatchChange:
    return BatchChange(from_step=step, rows=rows)


def length_from(step: int, length: int) -> LengthChange:
    return LengthChange(from_step=step, length=length)


def test_phases_begin_where_their_changes_say():
    config = replace(
        CONFIG,
        # 3 batches of 4 rows of 4 tokens are 48 tokens.
        batch_schedule=[rows_from(3, 8), BatchChange(from_tokens=1300, rows=6)],
        sequence_schedule=[length_from(0, 4), length_from(5, 16)],
    )
    assert phases_of(config) == (
        Phase(0, 4, 4),
        Phase(3, 8, 4, first_part=12, first_token=48),
        # 28 parts of 4 are 7 rows of 16.
        Phase(5, 8, 16, first_part=7, first_token=112),
        # 112 + 10 * 128 is the first number of tokens from 1300 on.
        Phase(15, 6, 16, first_part=87, first_token=1392),
    )


@given(
    changes=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=4),
    skips=st.lists(st.integers(0, 20), max_size=4).map(sorted),
    step=st.integers(0, 25),
)
@settings(max_examples=60, deadline=None)
def test_tokens_are_those_of_the_batches_that_were_not_skipped(changes, skips, step):
    changes = [rows_from(*change) for change in sorted(dict(changes).items())]
    skips = skips[: len(skips) // 2 * 2]
    config = replace(CONFIG, batch_schedule=changes, skip_batches=skips)
    phases = phases_of(config)
    numbers = [batch_number(s, skips) for s in range(step)]
    expected = sum(phase_at(phases, n).tokens_per_batch for n in numbers)
    assert tokens_before(config, step) == expected


def read(config: DataConfig, steps: range) -> Batch:
    """Return all rows of some steps, one after another."""
    order = Order(open_sources(config, text_store), config, 3)
    batches = [order.read(step) for step in steps]
    return Batch(*map(np.concatenate, zip(*batches, strict=True)))


def test_a_schedule_of_rows_reads_the_same_rows_in_the_same_order(config):
    schedule = replace(config, batch_schedule=[rows_from(2, 12), rows_from(5, 20)])
    plain = read(config, range(20))
    scheduled = read(schedule, range(9))  # 2 x 8 + 3 x 12 + 4 x 20 = 132 rows
    for name, a, b in zip(Batch._fields, scheduled, plain, strict=True):
        np.testing.assert_array_equal(a, b[:132], err_msg=name)


def test_short_rows_are_parts_of_rows_whose_documents_begin_again(config):
    """8 rows of 4 tokens are 2 of 16, and batch 3 begins with a whole row."""
    short = replace(config, sequence_schedule=[length_from(0, 4), length_from(3, 16)])
    parts = read(short, range(3))
    later = read(short, range(3, 5))
    plain = read(config, range(3))
    for name in ("inputs", "targets"):
        expected = getattr(plain, name)
        np.testing.assert_array_equal(getattr(parts, name).reshape(6, 16), expected[:6])
        np.testing.assert_array_equal(getattr(later, name), expected[6:22])
    ids = parts.segment_ids
    positions = parts.positions
    assert (ids[:, 0] == 1).all()
    assert (positions[:, 0] == 0).all()
    same_document = ids[:, 1:] == ids[:, :-1]
    assert not same_document.all(), "the text has no short document"
    np.testing.assert_array_equal(
        positions[:, 1:], np.where(same_document, positions[:, :-1] + 1, 0)
    )


def test_excerpts_show_the_text_of_short_rows(config):
    short = replace(config, sequence_schedule=[length_from(0, 4)])
    order = Order(open_sources(short, text_store), short, 3)
    targets = order.read(7).targets
    text = dict[int, str]()
    for excerpt in excerpts(order, 7):
        text[excerpt.row] = text.get(excerpt.row, "") + excerpt.text
    assert text[5].encode() == bytes(targets[5].tolist())


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"batch_schedule": [BatchChange(rows=2)]}, "batch_schedule"),
        ({"batch_schedule": [rows_from(5, 2), rows_from(5, 3)]}, "batch_schedule"),
        ({"sequence_schedule": [length_from(0, 5)]}, "sequence_schedule[0].length"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_a_mistake(values, field):
    (mistake,) = data_mistakes(replace(CONFIG, **values))
    assert mistake.key == f"data.{field}"
