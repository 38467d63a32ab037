"""Packing, by hand and as properties of any set of sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from jaxrl.data.packing import pack_sequences, rows_bound, rows_needed
from jaxrl.errors import DataError


def sequence(length, first=1):
    tokens = np.arange(first, first + length, dtype=np.int32)
    return {"tokens": tokens, "loss_mask": tokens % 2 == 0}


def test_pack_sequences_longest_first_by_hand():
    packed = pack_sequences(
        [sequence(2, 10), sequence(4, 20), sequence(1, 30), sequence(2, 40)], rows=3, row_length=5
    )

    assert_array_equal(
        packed["tokens"], [[20, 21, 22, 23, 30], [10, 11, 40, 41, 0], [0, 0, 0, 0, 0]]
    )
    assert_array_equal(packed["positions"], [[0, 1, 2, 3, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    assert_array_equal(packed["segment_ids"], [[1, 1, 1, 1, 2], [1, 1, 2, 2, 0], [0, 0, 0, 0, 0]])
    assert packed["loss_mask"].dtype == np.bool_
    assert packed["loss_mask"].sum() == 5
    assert packed["positions"].dtype == packed["segment_ids"].dtype == np.int32


lengths_and_row = st.integers(1, 24).flatmap(
    lambda row: st.tuples(st.lists(st.integers(1, row), min_size=1, max_size=30), st.just(row))
)


@settings(max_examples=100, deadline=None)
@given(lengths_and_row)
def test_pack_sequences_any_lengths_come_back_whole_and_in_one_piece(case):
    lengths, row_length = case
    rows = rows_needed(lengths, row_length)
    starts = np.cumsum([1, *lengths])
    sequences = [
        sequence(length, int(start)) for length, start in zip(lengths, starts, strict=False)
    ]

    packed = pack_sequences(sequences, rows=rows, row_length=row_length)

    found = []
    for row in range(rows):
        ids = packed["segment_ids"][row]
        for segment in range(1, ids.max() + 1):
            place = np.flatnonzero(ids == segment)
            assert_array_equal(place, np.arange(place[0], place[-1] + 1))
            assert_array_equal(packed["positions"][row, place], np.arange(len(place)))
            found.append(tuple(packed["tokens"][row, place]))
    assert sorted(found) == sorted(tuple(s["tokens"]) for s in sequences)
    padding = packed["segment_ids"] == 0
    assert not packed["tokens"][padding].any()
    assert not packed["positions"][padding].any()
    assert (~padding).sum() == sum(lengths)


@settings(max_examples=100, deadline=None)
@given(lengths_and_row)
def test_rows_needed_never_exceeds_the_bound_and_never_beats_the_volume(case):
    lengths, row_length = case

    needed = rows_needed(lengths, row_length)

    assert -(-sum(lengths) // row_length) <= needed
    assert needed <= rows_bound(len(lengths), max(lengths), row_length)


def test_pack_sequences_no_sequences_gives_padding():
    packed = pack_sequences([], rows=2, row_length=3)

    assert rows_needed([], 3) == 0
    assert_array_equal(packed["segment_ids"], np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([sequence(2), sequence(6)], "sequence 1 has 6 tokens; a row holds between 1 and 5"),
        ([sequence(2), sequence(0)], "sequence 1 has 0 tokens"),
        ([sequence(4), sequence(3), sequence(4)], "sequence 1 of 3 tokens does not fit: 3 seq.* 3"),
        ([{"tokens": np.zeros(2), "mask": np.zeros(3)}], "sequence 0 must have 1-D arrays"),
        ([{"tokens": np.zeros((2, 2))}], "sequence 0 must have 1-D arrays of one length"),
        ([{}], "sequence 0 must have 1-D arrays"),
        ([{"positions": np.zeros(2)}], "which packing itself adds"),
        ([sequence(2), {"tokens": np.zeros(2, np.int32)}], "sequence 1 has arrays"),
    ],
)
def test_pack_sequences_wrong_sequence_is_named(sequences, message):
    with pytest.raises(DataError, match=message):
        pack_sequences(sequences, rows=2, row_length=5)


def test_rows_bound_sequence_longer_than_a_row_raises():
    assert rows_bound(10, 4, 9) == 5

    with pytest.raises(DataError, match="sequences of 10 tokens do not fit into rows of 9"):
        rows_bound(1, 10, 9)
