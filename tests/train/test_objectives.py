"""Losses and metrics of the objectives from given log-probabilities, against numpy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config import AlgorithmConfig
from jaxrl.train.objectives import Metrics, grpo_objective, sft_objective

MASK = np.array([[False, True, True], [False, True, False]])
LOGP = np.array([[0.0, -1.0, -2.0], [0.0, -0.5, -9.0]], np.float32)
BEHAVIOR = np.array([[0.0, -1.5, -2.0], [0.0, -0.2, 0.0]], np.float32)
ADVANTAGES = np.array([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]], np.float32)
ENTROPY = np.array([[3.0, 1.0, 2.0], [3.0, 0.5, 4.0]], np.float32)


def batch(**changes):
    weights = np.where(MASK, 1 / 3, 0).astype(np.float32)
    arrays = {
        "loss_mask": MASK,
        "loss_weights": weights,
        "behavior_logp": BEHAVIOR,
        "advantages": ADVANTAGES,
    }
    return {name: jnp.asarray(array) for name, array in (arrays | changes).items()}


def terms(objective, logp=LOGP, **changes):
    return objective.terms(jnp.asarray(logp), jnp.asarray(ENTROPY), batch(**changes))


def test_grpo_not_decoupled_equals_ppo_by_hand():
    config = AlgorithmConfig(decoupled=False, clip_low=0.2, clip_high=0.3)

    got = terms(grpo_objective(config))

    # Token (0,1): A = 1, r = e^0.5 = 1.65, clipped to 1.3. (0,2): r = 1. (1,1): A = -2, r = e^-0.3
    # = 0.741, clipped to 0.8.
    np.testing.assert_allclose(got.loss, [[0, -1.3, -1], [0, 1.6, 0]], rtol=1e-6, atol=0)
    np.testing.assert_allclose(got.means["clip_fraction"], [[0, 1, 0], [0, 1, 0]])
    np.testing.assert_allclose(
        got.means["ratio"], [[0, np.exp(0.5), 1], [0, np.exp(-0.3), 0]], rtol=1e-6, atol=0
    )
    np.testing.assert_allclose(
        got.means["logp_gap"], [[0, 0.5, 0], [0, 0.3, 0]], rtol=1e-6, atol=1e-7
    )
    np.testing.assert_allclose(got.means["entropy"], [[0, 1, 2], [0, 0.5, 0]])
    np.testing.assert_allclose(got.maxima["ratio_max"], got.means["ratio"], rtol=0, atol=0)


def test_grpo_decoupled_is_policy_gradient_weighted_by_capped_importance():
    config = AlgorithmConfig(decoupled=True, behavior_weight_cap=1.5)

    def loss(logp):
        return jnp.sum(terms(grpo_objective(config), logp).loss)

    got = terms(grpo_objective(config))
    grads = jax.grad(loss)(jnp.asarray(LOGP))

    # The ratio to the proximal policy is 1; its gradient is that of logp.
    expected = np.array([[0, -1.5, -1], [0, 2 * np.exp(-0.3), 0]])
    np.testing.assert_allclose(got.loss, expected, rtol=1e-6, atol=0)
    np.testing.assert_allclose(grads, expected, rtol=1e-6, atol=0)
    np.testing.assert_allclose(got.means["cap_fraction"], [[0, 1, 0], [0, 0, 0]])


def test_grpo_decoupled_uses_prox_logp_of_the_batch():
    got = terms(grpo_objective(AlgorithmConfig(decoupled=True)), prox_logp=LOGP - 0.1)

    np.testing.assert_allclose(
        got.means["ratio"], np.where(MASK, np.exp(0.1), 0), rtol=1e-6, atol=0
    )


def test_grpo_with_kl_adds_the_k3_estimate():
    ref = LOGP + np.float32(0.3)
    plain = terms(grpo_objective(AlgorithmConfig()))

    objective = grpo_objective(AlgorithmConfig(kl_coef=0.5))
    got = terms(objective, ref_logp=ref)

    kl = np.where(MASK, np.exp(0.3) - 1 - 0.3, 0)
    np.testing.assert_allclose(got.means["kl"], kl, rtol=1e-5, atol=0)
    np.testing.assert_allclose(got.loss, plain.loss + 0.5 * kl, rtol=1e-6, atol=0)
    assert objective.needs == ("ref_logp",)
    assert "kl" not in plain.means


@pytest.mark.parametrize(
    "config",
    [AlgorithmConfig(), AlgorithmConfig(decoupled=False), AlgorithmConfig(kl_coef=0.1)],
    ids=["decoupled", "clipped", "kl"],
)
def test_grpo_nan_outside_the_mask_changes_nothing(config):
    objective = grpo_objective(config)
    extra = {"ref_logp": BEHAVIOR} if config.kl_coef else {}
    dirt = {
        name: np.where(MASK, array, np.nan)
        for name, array in {"behavior_logp": BEHAVIOR, "advantages": ADVANTAGES, **extra}.items()
    }

    def loss(logp, changes):
        got = terms(objective, logp, **changes)
        return jnp.sum(got.loss * batch()["loss_weights"]), got.means

    grad = jax.value_and_grad(loss, has_aux=True)
    (clean, clean_means), clean_grads = grad(jnp.asarray(LOGP), extra)
    (dirty, dirty_means), dirty_grads = grad(jnp.asarray(np.where(MASK, LOGP, np.nan)), dirt)

    assert float(clean) == float(dirty)
    np.testing.assert_array_equal(clean_grads, dirty_grads)
    for name in clean_means:
        np.testing.assert_array_equal(clean_means[name], dirty_means[name], name)


def test_sft_is_negative_log_likelihood():
    got = terms(sft_objective())

    np.testing.assert_allclose(got.loss, [[0, 1, 2], [0, 0.5, 0]])
    np.testing.assert_allclose(got.means["nll"], got.loss)


def test_metrics_add_sums_and_keep_the_largest():
    left = Metrics({"loss": jnp.float32(1)}, {"ratio_max": jnp.float32(3)})
    right = Metrics({"loss": jnp.float32(2)}, {"ratio_max": jnp.float32(0.5)})

    total = left + right

    assert float(total.sums["loss"]) == 3
    assert float(total.maxima["ratio_max"]) == 3


def test_objective_greedy_temperature_is_refused():
    with pytest.raises(ValueError, match=r"temperature=0.0 must be positive"):
        grpo_objective(AlgorithmConfig(), temperature=0.0)


def test_objective_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sft_objective().temperature = 2.0
