"""Group-relative advantages, against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl.algorithms.advantages import group_relative


def test_group_relative_one_right_of_two_gives_plus_and_minus_one():
    assert_allclose(group_relative([1.0, 0.0]), [1.0, -1.0], rtol=0, atol=1e-5)


def test_group_relative_uses_population_standard_deviation():
    # mean 0.25, population variance (0.75² + 3 · 0.25²) / 4 = 0.1875, std 0.4330127
    expected = [0.75 / 0.4330127, *[-0.25 / 0.4330127] * 3]

    assert_allclose(group_relative([1, 0, 0, 0]), expected, rtol=0, atol=1e-5)


def test_group_relative_without_std_only_subtracts_the_mean():
    advantages = group_relative([3.0, 1.0, 2.0], normalize_std=False)

    assert_allclose(advantages, [1.0, -1.0, 0.0], rtol=0, atol=1e-7)
    assert advantages.dtype == np.float32


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e9, -0.7])
def test_group_relative_equal_rewards_give_exact_zeros(reward, normalize_std):
    # The mean of seven times 0.1 is not 0.1 in floating point.
    advantages = group_relative([reward] * 7, normalize_std=normalize_std)

    assert_array_equal(advantages, np.zeros(7, np.float32))


def test_group_relative_single_sample_gives_zero():
    assert_array_equal(group_relative([5.0]), [0.0])


@pytest.mark.parametrize("rewards", [[], [[1.0, 0.0]]])
def test_group_relative_wrong_shape_raises(rewards):
    with pytest.raises(ValueError, match="one-dimensional and not empty"):
        group_relative(rewards)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_group_relative_non_finite_reward_raises_with_its_place(bad):
    with pytest.raises(ValueError, match=r"rewards\[1\]"):
        group_relative([0.0, bad, 1.0])
