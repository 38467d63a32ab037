"""AdamW, clipping and schedules against numbers worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.config import SFTConfig, TrainConfig
from jaxrl.train.optimizer import adamw, make_optimizer, make_schedule


def numpy_adamw(w, grads, *, lr, b1, b2, eps, decay):
    """Loshchilov & Hutter 2019, algorithm 2, in float64; `grads` are those of consecutive
    updates."""
    m = v = np.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        w = w - lr * (m_hat / (np.sqrt(v_hat) + eps) + decay * w)
    return w


def apply(optimizer, params, grads):
    state = optimizer.init(params)
    for g in grads:
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_adamw_three_updates_equal_numpy():
    rng = np.random.default_rng(0)
    w, grads = rng.normal(size=(4, 3)), [rng.normal(size=(4, 3)) for _ in range(3)]
    optimizer = adamw(
        optax.constant_schedule(0.1), grad_clip=0, weight_decay=0.01, b1=0.9, b2=0.95, eps=1e-3
    )

    got = apply(optimizer, {"w": jnp.float32(w)}, [{"w": jnp.float32(g)} for g in grads])

    expected = numpy_adamw(w, grads, lr=0.1, b1=0.9, b2=0.95, eps=1e-3, decay=0.01)
    np.testing.assert_allclose(got["w"], expected, rtol=1e-5, atol=1e-6)


def test_adamw_clips_to_global_norm():
    # The norm over both leaves is 5 (3-4-5): clipping to 1 divides by 5. With b1 = 0, b2 = 0 and a
    # large eps an update is -lr * g / (|g| + eps).
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    optimizer = adamw(optax.constant_schedule(1.0), grad_clip=1.0, b1=0.0, b2=0.0, eps=1.0)

    got = apply(optimizer, params, [{"a": jnp.float32([3.0]), "b": jnp.float32([-4.0])}])

    np.testing.assert_allclose(got["a"], [-0.6 / 1.6], rtol=1e-6, atol=0)
    np.testing.assert_allclose(got["b"], [0.8 / 1.8], rtol=1e-6, atol=0)


def test_adamw_decays_matrices_but_not_norms():
    norm = {"scale": jnp.ones(2), "key_bias": jnp.ones(2)}
    params = {"norm": norm, "kernel": jnp.ones(2)}
    grads = jax.tree.map(jnp.zeros_like, params)

    got = apply(adamw(optax.constant_schedule(0.5), weight_decay=0.1), params, [grads])

    np.testing.assert_allclose(got["norm"]["scale"], [1.0, 1.0], rtol=0, atol=0)
    np.testing.assert_allclose(got["norm"]["key_bias"], [1.0, 1.0], rtol=0, atol=0)
    np.testing.assert_allclose(got["kernel"], [0.95, 0.95], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0]),
    ],
)
def test_make_schedule_with_warmup_gives_these_rates(name, expected):
    schedule = make_schedule(name, learning_rate=1.0, warmup_steps=2, total_steps=6)

    got = [float(schedule(step)) for step in range(7)]

    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_make_schedule_without_warmup_starts_at_the_peak():
    schedule = make_schedule("linear", learning_rate=0.3, total_steps=3)

    np.testing.assert_allclose(
        [float(schedule(step)) for step in range(4)], [0.3, 0.2, 0.1, 0.0], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "step"}, "schedule='step' must be one of constant, linear, cosine"),
        ({"name": "linear", "warmup_steps": 5, "total_steps": 4}, "at most total_steps=4"),
        ({"name": "linear", "warmup_steps": -1}, "warmup_steps=-1"),
    ],
)
def test_make_schedule_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(learning_rate=1.0, **arguments)


@pytest.mark.parametrize("config", [SFTConfig, TrainConfig])
def test_make_optimizer_takes_rate_and_course_from_the_config(config):
    optimizer = make_optimizer(config(steps=10, learning_rate=0.25, schedule="linear"))

    np.testing.assert_allclose(float(optimizer.schedule(4)), 0.15, rtol=1e-6, atol=0)
    longer = make_optimizer(config(steps=10, learning_rate=0.25, schedule="linear"), total_steps=8)
    np.testing.assert_allclose(float(longer.schedule(4)), 0.125, rtol=1e-6, atol=0)
