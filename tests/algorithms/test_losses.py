"""Losses against numbers worked by hand, and their behaviour outside the mask and at extremes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl.algorithms import losses, masks

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
LOG2 = float(np.log(2.0))


def row(*values):
    return jnp.array([values], jnp.float32)


def all_true(like):
    return jnp.ones(like.shape, bool)


def clipped(logp, behavior_logp, advantages, mask):
    return losses.clipped_surrogate(logp, behavior_logp, advantages, mask, **CLIP).loss


def decoupled(logp, prox_logp, behavior_logp, advantages, mask):
    return losses.decoupled_surrogate(
        logp, prox_logp, behavior_logp, advantages, mask, weight_cap=5.0, **CLIP
    ).loss


LOSS_CASES = {
    "clipped": (clipped, 3),
    "decoupled": (decoupled, 4),
    "kl_k3": (losses.kl_k3, 2),
    "nll": (losses.nll, 1),
}
"""Name -> loss and the number of its arrays before the mask."""

every_loss = pytest.mark.parametrize("name", LOSS_CASES)


def test_clipped_surrogate_ratio_inside_the_clip_is_minus_advantage_times_ratio():
    logp, behavior = row(np.log(1.1), np.log(0.9)), row(0.0, 0.0)

    loss = clipped(logp, behavior, row(2.0, -3.0), all_true(logp))

    assert_allclose(loss, [[-2.2, 2.7]], rtol=1e-6, atol=1e-6)


def test_clipped_surrogate_takes_the_worse_of_clipped_and_unclipped():
    # ratio 2 and 0.5 with A = ±1; bounds 0.8 and 1.3.
    logp, behavior = row(LOG2, LOG2, -LOG2, -LOG2), row(0, 0, 0, 0)

    loss = clipped(logp, behavior, row(1, -1, 1, -1), all_true(logp))

    assert_allclose(loss, [[-1.3, 2.0, -0.5, 0.8]], rtol=1e-6, atol=1e-6)


def test_clipped_surrogate_gradient_is_zero_exactly_where_the_clip_is_active():
    logp, behavior, advantages = row(LOG2, LOG2, -LOG2, -LOG2), row(0, 0, 0, 0), row(1, -1, 1, -1)

    gradient = jax.grad(lambda x: clipped(x, behavior, advantages, all_true(x)).sum())(logp)

    # d(-A r)/dlogp = -A r where the clip is not active.
    assert_allclose(gradient, [[0.0, 2.0, -0.5, 0.0]], rtol=1e-6, atol=0)
    assert gradient[0, 0] == 0
    assert gradient[0, 3] == 0


def test_clipped_surrogate_on_policy_gradient_is_minus_advantage():
    logp, advantages = row(-1.0, -2.0, -0.1), row(0.5, -2.0, 0.0)

    gradient = jax.grad(lambda x: clipped(x, logp, advantages, all_true(x)).sum())(logp)

    assert_allclose(gradient, [[-0.5, 2.0, 0.0]], rtol=1e-6, atol=0)


def test_clipped_surrogate_metrics_report_ratio_and_clipping():
    logp, behavior, mask = row(LOG2, LOG2, 0), row(0, 0, 0), jnp.array([[True, True, False]])

    metrics = losses.clipped_surrogate(logp, behavior, row(1, -1, 1), mask, **CLIP).metrics

    assert_allclose(metrics["ratio"], [[2, 2, 0]], rtol=1e-6, atol=0)
    assert_array_equal(metrics["clip_fraction"], [[1, 0, 0]])


def test_decoupled_surrogate_is_weight_times_clipped_loss_around_the_proximal_policy():
    # r = exp(logp - prox) = 2, clipped to 1.3 for A = 1; w = exp(prox - behavior) = 0.5.
    logp, prox, behavior = row(0.0), row(-LOG2), row(0.0)

    loss = decoupled(logp, prox, behavior, row(1.0), all_true(logp))

    assert_allclose(loss, [[-0.65]], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("cap", "weight"), [(0.0, 8.0), (5.0, 5.0), (100.0, 8.0)], ids=["no-cap", "capped", "below-cap"]
)
def test_decoupled_surrogate_weight_is_capped_but_never_dropped(cap, weight):
    prox, behavior = row(3 * LOG2), row(0.0)

    result = losses.decoupled_surrogate(
        prox, prox, behavior, row(-2.0), all_true(prox), weight_cap=cap, **CLIP
    )

    assert_allclose(result.loss, [[2.0 * weight]], rtol=1e-5, atol=0)
    assert_allclose(result.metrics["behavior_weight"], [[8.0]], rtol=1e-5, atol=0)
    assert result.metrics["cap_fraction"][0, 0] == (weight == 5.0)


def test_decoupled_surrogate_weight_and_proximal_policy_carry_no_gradient():
    logp, behavior, advantages = row(-1.0, -0.5), row(-1.0 - LOG2, -0.5), row(1.0, -1.0)

    def loss(x):
        # One update per batch: the proximal policy is the policy itself.
        return decoupled(x, x, behavior, advantages, all_true(x)).sum()

    # w = 2 and 1, r = 1: d/dlogp = -w A. A gradient through w would change it.
    assert_allclose(jax.grad(loss)(logp), [[-2.0, 1.0]], rtol=1e-6, atol=0)


def test_decoupled_surrogate_equals_clipped_when_proximal_is_behavior():
    logp, behavior, advantages = row(0.1, -0.4, 0.9), row(0.0, 0.0, 0.0), row(1.0, -1.0, 2.0)

    expected = clipped(logp, behavior, advantages, all_true(logp))

    actual = decoupled(logp, behavior, behavior, advantages, all_true(logp))
    assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


def test_kl_k3_by_hand():
    # d = ref - logp: log 2 -> 2 - 1 - log 2; -log 2 -> 0.5 - 1 + log 2; 0 -> 0
    logp, ref = row(-1.0, -1.0, -1.0), row(-1.0 + LOG2, -1.0 - LOG2, -1.0)

    kl = losses.kl_k3(logp, ref, all_true(logp))

    assert_allclose(kl, [[1 - LOG2, LOG2 - 0.5, 0.0]], rtol=1e-5, atol=1e-7)


def test_kl_k3_gradient_by_hand():
    logp, ref = row(-1.0, -1.0), row(-1.0 + LOG2, -1.0)

    gradient = jax.grad(lambda x: losses.kl_k3(x, ref, all_true(x)).sum())(logp)

    # dk3/dlogp = 1 - exp(ref - logp)
    assert_allclose(gradient, [[-1.0, 0.0]], rtol=1e-5, atol=1e-7)


def test_kl_k3_expectation_is_the_divergence():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    logp, ref = jnp.log(jnp.array(p)), jnp.log(jnp.array(q))

    k3 = losses.kl_k3(logp, ref, all_true(logp))

    assert_allclose((p * np.asarray(k3)).sum(), (p * np.log(p / q)).sum(), rtol=1e-5, atol=0)


def test_nll_is_minus_logp_in_the_mask():
    loss = losses.nll(row(-1.5, -2.5), jnp.array([[True, False]]))

    assert_array_equal(loss, [[1.5, 0.0]])


@every_loss
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_loss_poison_outside_the_mask_changes_neither_value_nor_gradient(name, poison):
    loss, count = LOSS_CASES[name]
    mask = jnp.array([[True, False, True]])
    clean = [row(-0.5 - 0.1 * i, 0.0, -1.0 + 0.2 * i) for i in range(count)]
    dirty = [jnp.where(mask, x, poison) for x in clean]

    def total(arrays):
        return loss(*arrays, mask).sum()

    value, gradients = jax.jit(jax.value_and_grad(total))(dirty)
    clean_value, clean_gradients = jax.jit(jax.value_and_grad(total))(clean)

    assert_array_equal(value, clean_value)
    assert loss(*dirty, mask)[0, 1] == 0
    for gradient, expected in zip(gradients, clean_gradients, strict=True):
        assert_array_equal(gradient, expected)
        assert gradient[0, 1] == 0


@every_loss
def test_loss_nan_inside_the_mask_is_not_hidden(name):
    loss, count = LOSS_CASES[name]
    arrays = [row(np.nan, -1.0)] * count

    result = loss(*arrays, jnp.array([[True, True]]))

    assert np.isnan(result[0, 0])
    assert np.isfinite(result[0, 1])


@pytest.mark.parametrize("name", ["clipped", "decoupled", "kl_k3"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_loss_extreme_ratio_has_finite_value_and_gradient(name, advantage):
    loss, count = LOSS_CASES[name]
    logp = row(0.0, -1000.0, -np.inf, -1e30)
    other = row(-1000.0, 0.0, 0.0, 0.0)
    arrays = [other] * (count - 1)
    if count > 2:
        arrays[-1] = jnp.full_like(logp, advantage)

    value, gradient = jax.value_and_grad(lambda x: loss(x, *arrays, all_true(x)).sum())(logp)

    assert np.isfinite(value)
    assert np.isfinite(np.asarray(gradient)).all()


@every_loss
def test_loss_half_precision_inputs_give_float32_ratios(name):
    loss, count = LOSS_CASES[name]
    arrays = [jnp.full((1, 2), -0.5, jnp.bfloat16)] * count

    result = loss(*arrays, jnp.ones((1, 2), bool))

    assert np.isfinite(np.asarray(result, np.float32)).all()


@every_loss
def test_loss_shapes_that_differ_raise_with_names_and_shapes(name):
    loss, count = LOSS_CASES[name]
    arrays = [row(0.0, 0.0)] * count

    with pytest.raises(AssertionError, match=r"mask \(1, 3\).*logp \(1, 2\)"):
        loss(*arrays, jnp.ones((1, 3), bool))


@every_loss
def test_loss_mask_that_is_not_bool_raises(name):
    loss, count = LOSS_CASES[name]

    with pytest.raises(AssertionError, match="mask must be bool, got float32"):
        loss(*[row(0.0)] * count, row(1.0))


def test_clipped_surrogate_negative_clip_raises():
    x = row(0.0)

    with pytest.raises(ValueError, match=r"clip_low=-0\.1"):
        losses.clipped_surrogate(x, x, x, all_true(x), clip_low=-0.1, clip_high=0.2)


def test_get_loss_unknown_name_lists_the_known_ones():
    assert losses.get_loss("grpo") is losses.clipped_surrogate

    with pytest.raises(
        ValueError, match=r"loss='gppo' must be one of \['decoupled_grpo', 'grpo'\]"
    ):
        losses.get_loss("gppo")


def test_masked_mean_of_an_empty_mask_is_zero_and_ignores_what_is_outside():
    x = row(np.nan, 4.0, 2.0)

    assert masks.masked_mean(x, jnp.zeros(x.shape, bool)) == 0
    assert masks.masked_mean(x, jnp.array([[False, True, True]])) == 3.0
    assert masks.masked_sum(x, jnp.array([[False, True, True]])) == 6.0
