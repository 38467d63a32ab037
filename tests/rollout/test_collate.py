"""Groups become one packed batch: every token in its place, numbers worked by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxrl.errors import ConfigError, DataError
from jaxrl.rollout.collate import collate, rows_for
from jaxrl.types import NO_VERSION


def test_collate_two_groups_places_tokens_and_advantages(fakes):
    groups = [
        fakes.make_group(0, rewards=(1.0, 0.0), version=3, sampled=3),
        fakes.make_group(1, rewards=(0.5, 0.5), version=4, sampled=2),
    ]

    batch = collate(groups, rows=2, row_length=10)

    # Sequences of 5, 5, 4 and 4 tokens (2 of each the prompt), longest first.
    assert batch.segment_ids.tolist() == [[1] * 5 + [2] * 5, [1] * 4 + [2] * 4 + [0, 0]]
    assert batch.positions[1].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0]
    assert batch.tokens[0].tolist() == [1, 2, 3, 4, 5] * 2
    assert batch.loss_mask[1].tolist() == ([False] * 2 + [True] * 2) * 2 + [False] * 2
    np.testing.assert_allclose(
        batch.advantages,
        [[0, 0, 1, 1, 1, 0, 0, -1, -1, -1], [0.0] * 10],
        rtol=0,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        batch.loss_weights, np.where(batch.loss_mask, 0.1, 0.0), rtol=1e-6, atol=0
    )
    np.testing.assert_array_equal(
        batch.behavior_logp, np.where(batch.loss_mask, np.float32(-0.25), np.float32(0))
    )
    assert set(batch.versions[0][batch.loss_mask[0]]) == {3}
    assert set(batch.versions[~batch.loss_mask]) == {NO_VERSION}


def test_collate_has_the_dtypes_of_the_contract(fakes):
    batch = collate([fakes.make_group()], rows=1, row_length=16)

    assert {name: str(array.dtype) for name, array in batch.arrays().items()} == {
        "tokens": "int32",
        "positions": "int32",
        "segment_ids": "int32",
        "loss_mask": "bool",
        "loss_weights": "float32",
        "advantages": "float32",
        "behavior_logp": "float32",
        "versions": "int32",
    }
    assert {array.shape for array in batch.arrays().values()} == {(1, 16)}


def test_collate_sequence_normalisation_weighs_sequences_equally(fakes):
    groups = [fakes.make_group(0, sampled=4), fakes.make_group(1, sampled=1)]

    batch = collate(groups, rows=2, row_length=12, normalisation="sequence")

    assert batch.loss_weights.sum() == pytest.approx(1.0, abs=1e-6)
    assert sorted(set(batch.loss_weights[batch.loss_mask].round(5))) == pytest.approx(
        [1 / 16, 1 / 4], abs=1e-5
    )


def test_collate_without_std_keeps_differences(fakes):
    groups = [fakes.make_group(0, rewards=(1.0, 0.0, 0.0, 0.0))]

    batch = collate(groups, rows=2, row_length=10, normalize_std=False)

    values = sorted(set(batch.advantages[batch.loss_mask].tolist()))
    np.testing.assert_allclose(values, [-0.25, 0.75], rtol=0, atol=1e-6)


def test_collate_that_does_not_fit_gives_the_numbers(fakes):
    groups = [fakes.make_group(i) for i in range(3)]

    with pytest.raises(
        DataError, match=r"6 sequences of 30 tokens \(longest 5\) need 3 rows of 10.*has 2"
    ):
        collate(groups, rows=2, row_length=10)
    with pytest.raises(DataError, match="p0/0 has 5 tokens, but rows hold row_length=4"):
        collate(groups, rows=9, row_length=4)
    with pytest.raises(DataError, match="at least one group"):
        collate([], rows=1, row_length=8)


@pytest.mark.parametrize(
    ("batch_size", "longest", "row_length", "options", "rows"),
    [
        (16, 64, 256, {}, 4),
        (16, 100, 256, {}, 8),
        (16, 64, 64, {}, 16),
        (16, 64, 256, {"micro_batches": 2, "data_axes": 4}, 8),
        (1, 5, 8, {"data_axes": 8}, 8),
    ],
)
def test_rows_for_is_the_bound_rounded_to_the_mesh(batch_size, longest, row_length, options, rows):
    assert rows_for(batch_size, longest, row_length, **options) == rows


def test_rows_for_sequences_longer_than_a_row_are_refused():
    with pytest.raises(ConfigError, match=r"up to 65 tokens .* row_length=64"):
        rows_for(4, 65, 64)


def test_rows_for_suffices_for_any_lengths(fakes):
    dice = random.Random(3)
    for _ in range(60):
        longest, count = dice.randint(3, 20), dice.randint(1, 6)
        row_length = dice.randint(longest, 50)
        groups = [
            fakes.make_group(i, sampled=dice.choice([longest - 2, dice.randint(1, longest - 2)]))
            for i in range(count)
        ]

        rows = rows_for(2 * count, longest, row_length)
        batch = collate(groups, rows=rows, row_length=row_length)

        assert (batch.segment_ids > 0).sum() == sum(
            len(t.tokens) for g in groups for t in g.trajectories
        )
