"""Losses per token: pure functions of arrays, for use under `jit` and `grad`.

All arrays have the shape of `mask` (usually [R, T]). A loss is exactly 0, with exactly 0 gradient,
where the mask is False, whatever the inputs hold there. The total loss is the sum of the per-token
losses times `token_weights`. Shape mistakes raise AssertionError at the door.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.algorithms.masks import check_token_arrays, keep

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 (e^20 ≈ 5e8) before exp: float32 overflows beyond 88, and the
gradient of an overflowed, clipped ratio would be 0 · inf = NaN. Beyond it the gradient is 0."""


class PolicyLoss(NamedTuple):
    """`loss` [...] per token; `metrics`: name -> [...] per token, 0 outside the mask, no gradient.

    The mean of a metric over the mask is what one wants to see.
    """

    loss: jax.Array
    metrics: dict[str, jax.Array]


def clipped_surrogate(
    logp: jax.Array,
    behavior_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clipped objective, as a loss; GRPO uses it with group-relative advantages.

    r = exp(logp - behavior_logp);  loss = max(-A · r, -A · clip(r, 1 - clip_low, 1 + clip_high)).
    No gradient flows into `behavior_logp` and `advantages`. Where the clip is active (A > 0 and
    r > 1 + clip_high, or A < 0 and r < 1 - clip_low) the gradient is exactly 0.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; two bounds: DAPO, arXiv:2503.14476.
    """
    check_token_arrays(mask, logp=logp, behavior_logp=behavior_logp, advantages=advantages)
    log_ratio = _log_ratio(logp, jax.lax.stop_gradient(behavior_logp), mask)
    loss, ratio, clipped = _clip(log_ratio, advantages, mask, clip_low, clip_high)
    return PolicyLoss(loss, _metrics(mask, ratio=ratio, clip_fraction=clipped))


def decoupled_surrogate(
    logp: jax.Array,
    prox_logp: jax.Array,
    behavior_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    weight_cap: float = 0.0,
) -> PolicyLoss:
    """Decoupled PPO: clip around the proximal policy, reweight from the one that sampled.

    r = exp(logp - prox_logp);  w = exp(prox_logp - behavior_logp), capped at `weight_cap`;
    loss = w · max(-A · r, -A · clip(r, 1 - clip_low, 1 + clip_high)).
    w is a constant for the gradient; it applies to every token, and a `weight_cap` of 0 only means
    that it is not capped (short of e^20). A capped token keeps the weight `weight_cap`.
    Source: Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298.
    """
    check_token_arrays(
        mask,
        logp=logp,
        prox_logp=prox_logp,
        behavior_logp=behavior_logp,
        advantages=advantages,
    )
    if weight_cap < 0:
        raise ValueError(f"weight_cap={weight_cap} must be at least 0 (0: no cap)")
    prox_logp, behavior_logp = map(jax.lax.stop_gradient, (prox_logp, behavior_logp))
    loss, ratio, clipped = _clip(
        _log_ratio(logp, prox_logp, mask), advantages, mask, clip_low, clip_high
    )
    weight = jnp.exp(_log_ratio(prox_logp, behavior_logp, mask))
    applied = jnp.minimum(weight, weight_cap) if weight_cap else weight
    metrics = _metrics(
        mask,
        ratio=ratio,
        clip_fraction=clipped,
        behavior_weight=weight,
        cap_fraction=applied < weight,
    )
    return PolicyLoss(keep(mask, applied * loss), metrics)


def kl_k3(logp: jax.Array, ref_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """Schulman's k3 estimate of KL(policy ‖ reference) from tokens of the policy, never negative.

    d = ref_logp - logp;  k3 = exp(d) - 1 - d. No gradient flows into `ref_logp`.
    Source: J. Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    check_token_arrays(mask, logp=logp, ref_logp=ref_logp)
    log_ratio = -_log_ratio(logp, jax.lax.stop_gradient(ref_logp), mask)
    # expm1 keeps the digits near 0, where the penalty usually is.
    return keep(mask, jnp.expm1(log_ratio) - log_ratio)


def nll(logp: jax.Array, mask: jax.Array) -> jax.Array:
    """Negative log-likelihood, the supervised loss: -logp where the mask is True, else 0."""
    check_token_arrays(mask, logp=logp)
    return -keep(mask, logp)


LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "grpo": clipped_surrogate,
    "decoupled_grpo": decoupled_surrogate,
}
"""Policy losses by name; `get_loss` explains a wrong one."""


def get_loss(name: str) -> Callable[..., PolicyLoss]:
    """The policy loss called `name`. Raises ValueError that lists the names there are."""
    if name not in LOSSES:
        raise ValueError(f"loss={name!r} must be one of {sorted(LOSSES)}")
    return LOSSES[name]


def _log_ratio(numerator: jax.Array, denominator: jax.Array, mask: jax.Array) -> jax.Array:
    """Clamped numerator - denominator in float32; 0 outside the mask.

    Guarded before the subtraction: outside the mask both sides may be NaN or infinite.
    """
    difference = keep(mask, numerator).astype(jnp.float32) - keep(mask, denominator)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clip(
    log_ratio: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    clip_low: float,
    clip_high: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(loss, ratio, clip active) per token; chooses with `where`, whose gradient has no ties."""
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low} and clip_high={clip_high} must be at least 0")
    ratio = jnp.exp(log_ratio)
    advantages = keep(mask, jax.lax.stop_gradient(advantages)).astype(jnp.float32)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    bound = jnp.where(advantages > 0, high, low)
    return keep(mask, -advantages * jnp.where(clipped, bound, ratio)), ratio, clipped


def _metrics(mask: jax.Array, **values: jax.Array) -> dict[str, jax.Array]:
    return {
        name: jax.lax.stop_gradient(keep(mask, value.astype(jnp.float32)))
        for name, value in values.items()
    }
