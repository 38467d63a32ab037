"""Weights of tokens in the loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from jaxrl.algorithms.weights import token_weights

# Row 0: a sequence of 3 tokens (2 trained on) and one of 2 (1 trained on); row 1: one of 4 (3).
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
MASK = np.array([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0]], bool)


def test_token_weights_token_gives_every_token_the_same():
    assert_allclose(token_weights(MASK, SEGMENTS, "token"), MASK / 6, rtol=1e-6, atol=0)


def test_token_weights_sequence_gives_every_sequence_the_same():
    sixth, third, ninth = 1 / 6, 1 / 3, 1 / 9
    expected = [[0, sixth, sixth, 0, third, 0], [0, ninth, ninth, ninth, 0, 0]]

    assert_allclose(token_weights(MASK, SEGMENTS, "sequence"), expected, rtol=1e-6, atol=0)


def test_token_weights_sequence_ignores_sequences_without_a_token_in_the_mask():
    mask = MASK.copy()
    mask[1] = False

    weights = token_weights(mask, SEGMENTS, "sequence")

    assert_allclose(weights[0], [0, 0.25, 0.25, 0, 0.5, 0], rtol=1e-6, atol=0)
    assert not weights[1].any()


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(["token", "sequence"]))
def test_token_weights_any_batch_sums_to_one_and_is_zero_outside_the_mask(data, normalisation):
    rows, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    ids = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    segments = np.array([data.draw(ids) for _ in range(rows)])
    segments[0, 0] = 1
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    mask = np.array([data.draw(flags) for _ in range(rows)]) & (segments > 0)
    mask[0, 0] = True

    weights = token_weights(mask, segments, normalisation)

    assert weights.dtype == np.float32
    assert_allclose(weights.astype(np.float64).sum(), 1.0, rtol=0, atol=1e-6)
    assert (weights[~mask] == 0).all()
    assert (weights[mask] > 0).all()


@pytest.mark.parametrize(
    ("mask", "segments", "normalisation", "message"),
    [
        (MASK, SEGMENTS, "mean", "normalisation='mean' must be one of"),
        (MASK & False, SEGMENTS, "token", "no token of the batch"),
        (MASK | True, SEGMENTS, "token", "lies in padding"),
        (MASK, SEGMENTS[:, :3], "token", "of the same shape"),
        (MASK.astype(int), SEGMENTS, "token", "mask must be bool"),
    ],
)
def test_token_weights_wrong_input_raises(mask, segments, normalisation, message):
    with pytest.raises(ValueError, match=message):
        token_weights(mask, segments, normalisation)
