"""Rotary positions, norms, masks and grouped heads, worked by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl.config import ModelConfig
from jaxrl.models import attention as ops
from jaxrl.models.layers import Declare, RMSNorm
from jaxrl.models.rope import apply_rope, frequency_factors, rope_tables


def _rotate(x, position, theta=100.0):
    x = jnp.asarray(x, jnp.float32)[None, None, None]
    tables = rope_tables(jnp.array([[position]]), x.shape[-1], theta)
    return np.asarray(apply_rope(x, *tables))[0, 0, 0]


def test_rope_width_4_by_hand():
    # theta 100 and width 4 give the frequencies 1 and 0.1: at position 2, pair (1, 3) turns by 2
    # and pair (2, 4) by 0.2. cos 2 = -0.4161468, sin 2 = 0.9092974, cos .2 = 0.9800666, sin .2 =
    # 0.1986693.
    rotated = _rotate([1.0, 2.0, 3.0, 4.0], 2)

    expected = [-3.1440391, 1.1654558, -0.3391431, 4.3176050]
    np.testing.assert_allclose(rotated, expected, rtol=0, atol=1e-6)


def test_rope_position_0_changes_nothing():
    np.testing.assert_array_equal(_rotate([1.0, 2.0, 3.0, 4.0], 0), [1.0, 2.0, 3.0, 4.0])


def test_rope_other_theta_turns_the_slow_pair_only():
    slow, fast = _rotate([1.0, 2.0, 3.0, 4.0], 2), _rotate([1.0, 2.0, 3.0, 4.0], 2, theta=4.0)

    np.testing.assert_allclose(slow[[0, 2]], fast[[0, 2]], rtol=0, atol=1e-6)
    assert np.abs(slow[[1, 3]] - fast[[1, 3]]).min() > 0.1


def test_frequency_factors_by_hand():
    # Frequencies 1 and 1/100: within 800 positions they turn 127.3 and 1.273 times.
    llama3 = {
        "rope_type": "llama3",
        "factor": 5.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 800,
    }

    linear = frequency_factors(4, 1e4, {"rope_type": "linear", "factor": 4.0})
    np.testing.assert_array_equal(linear, np.float32([0.25, 0.25]))
    # 27.3% of the way from 1/5 to 1.
    np.testing.assert_allclose(
        frequency_factors(4, 1e4, llama3), [1.0, 0.2 + 0.8 * 0.27324], rtol=0, atol=1e-5
    )
    slow = {**llama3, "low_freq_factor": 1.3}
    np.testing.assert_allclose(frequency_factors(4, 1e4, slow), [1.0, 0.2], rtol=0, atol=1e-6)


def test_yarn_by_hand():
    # Frequencies 1, 0.1, 0.01, 0.001. In 2000 positions they turn 318.3, 31.83, 3.18, 0.318 times:
    # index 8 ln(2000 / (2 pi turns)) / (2 ln 1e4) is 0.9977 for 32 turns and 2.503 for one. The
    # ramp goes from 0 to 3: the frequencies are slowed down by 0, 1/3, 2/3 and all of 1 - 1/4.
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2000}

    factors = frequency_factors(8, 1e4, scaling)
    cos, sin = rope_tables(jnp.array([[0]]), 8, 1e4, scaling)

    np.testing.assert_allclose(factors, [1.0, 0.75, 0.5, 0.25], rtol=0, atol=1e-6)
    # 0.1 ln 4 + 1
    np.testing.assert_allclose(cos[0, 0], [1.1386294] * 4, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(sin, np.zeros((1, 1, 4)))
    cos, _ = rope_tables(jnp.array([[0]]), 8, 1e4, {**scaling, "attention_factor": 1.5})
    np.testing.assert_allclose(cos[0, 0], [1.5] * 4, rtol=0, atol=1e-6)


def test_softcap_by_hand():
    capped = ops.softcap(jnp.array([0.0, 1.0, -100.0]), 2.0)

    np.testing.assert_allclose(capped, [0.0, 0.9242343, -2.0], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(ops.softcap(jnp.array([3.0]), 0.0), [3.0])


def test_rope_linear_scaling_is_a_slower_position():
    scaled = rope_tables(jnp.array([[12]]), 8, 1e4, {"rope_type": "linear", "factor": 4.0})

    for have, want in zip(scaled, rope_tables(jnp.array([[3]]), 8, 1e4), strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-6)


def test_rope_dot_product_depends_on_the_distance_only():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 8))

    near = _rotate(query, 5) @ _rotate(key, 3)
    far = _rotate(query, 105) @ _rotate(key, 103)
    wider = _rotate(query, 6) @ _rotate(key, 3)

    np.testing.assert_allclose(near, far, rtol=0, atol=1e-4)
    assert abs(near - wider) > 1e-2


def test_rope_keeps_dtype_and_turns_in_float32():
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    tables = rope_tables(jnp.array([[1000]]), 4, 10000.0)

    rotated = apply_rope(x, *tables)

    assert rotated.dtype == jnp.bfloat16
    expected = apply_rope(x.astype(jnp.float32), *tables)
    np.testing.assert_array_equal(rotated, expected.astype(jnp.bfloat16))


def _norm(eps, scale):
    graphdef, _ = nnx.split(RMSNorm(len(scale), ModelConfig(norm_eps=eps), Declare("float32")))
    return nnx.merge(graphdef, {"scale": jnp.array(scale)})


def test_rms_norm_by_hand():
    # mean(9, 16) = 12.5, and with eps 0.5 the root is sqrt(13) = 3.6055513.
    normed = _norm(0.5, [1.0, 2.0])(jnp.array([3.0, 4.0]))

    np.testing.assert_allclose(normed, [0.8320503, 2.2188008], rtol=0, atol=1e-6)


def test_rms_norm_bfloat16_is_computed_in_float32():
    # 300^2 summed over 512 numbers has no place in bfloat16's 8 bits: sums would stall.
    x = jnp.array(300 + np.random.default_rng(0).normal(size=512), jnp.bfloat16)
    scale = [1.0] * 512

    normed = _norm(1e-6, scale)(x)

    expected = _norm(1e-6, scale)(x.astype(jnp.float32))
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(normed, expected.astype(jnp.bfloat16))


def test_rms_norm_zero_row_gives_finite_values_and_gradient():
    norm = _norm(1e-6, [1.0, 1.0])

    value, gradient = jax.value_and_grad(lambda x: norm(x).sum())(jnp.zeros(2))

    assert value == 0
    assert np.isfinite(gradient).all()


_attend = jax.jit(ops.attend)


def _qkv(n_heads, n_kv_heads, length=5, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(2, length, n_heads, 4), (2, n_kv_heads, length, 4), (2, n_kv_heads, length, 4)]
    return [jnp.array(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
def test_attend_grouped_heads_equal_repeated_keys(n_kv_heads):
    query, keys, values = _qkv(6, n_kv_heads)
    mask = ops.causal_mask(5, None)

    mixed = _attend(query, keys, values, mask)

    repeat = lambda x: np.repeat(x, 6 // n_kv_heads, axis=1)
    expected = _attend(query, repeat(keys), repeat(values), mask)
    np.testing.assert_allclose(mixed, expected, rtol=0, atol=1e-6)


def test_attend_one_head_by_hand():
    # Scores ln 1 and ln 3 after the division by sqrt(4): weights 1/4 and 3/4.
    query = jnp.array([2.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    keys = jnp.array([[0.0, 0, 0, 0], [np.log(3.0), 0, 0, 0]]).reshape(1, 1, 2, 4)
    values = jnp.array([[4.0, 0, 0, 0], [8.0, 4, 0, 0]]).reshape(1, 1, 2, 4)

    mixed = ops.attend(query, keys, values, jnp.ones((1, 1, 2), bool))

    np.testing.assert_allclose(mixed[0, 0, 0], [7.0, 3.0, 0, 0], rtol=0, atol=1e-6)


def test_attend_single_query_equals_the_same_query_among_others():
    query, keys, values = _qkv(6, 2)
    mask = ops.causal_mask(5, None)

    alone = _attend(query[:, 3:4], keys, values, mask[:, 3:4])

    together = _attend(query, keys, values, mask)[:, 3:4]
    np.testing.assert_allclose(alone, together, rtol=0, atol=1e-6)


# 65: a second chunk of one query; 128: full chunks; 600: chunks wider than 64.
@pytest.mark.parametrize(
    ("length", "window"),
    [(65, 0), (128, 0), (150, 20), pytest.param(600, 90, marks=pytest.mark.slow)],
)
def test_attend_causal_in_chunks_equals_whole_with_gradients(length, window):
    operands = _qkv(4, 2, length)
    # Segment 2 starts inside the second chunk and sees nothing of the first.
    segments = jnp.array([[1] * 64 + [2] * (length - 64), [1] * 30 + [0] * (length - 30)])
    mask = ops.causal_mask(length, segments, window)

    def mixed_and_gradients(causal):
        def loss(*operands):
            promises = {"causal": True, "window": window} if causal else {}
            mixed = ops.attend(*operands, mask, cap=2.0, scale=0.7, **promises)
            return jnp.sum(jnp.sin(mixed)), mixed

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*operands)

    (gradients, mixed), (want_gradients, want) = map(mixed_and_gradients, (True, False))

    np.testing.assert_allclose(mixed, want, rtol=0, atol=1e-6)
    for have, expected in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(have, expected, rtol=0, atol=1e-5)


def test_attend_row_without_any_key_is_finite_with_finite_gradient():
    inputs = _qkv(4, 2)
    mask = jnp.ones((2, 5, 5), bool).at[0, 2].set(False)

    def total(inputs):
        return ops.attend(*inputs, mask).sum()

    mixed, gradients = ops.attend(*inputs, mask), jax.jit(jax.grad(total))(inputs)

    np.testing.assert_allclose(mixed[0, 2, 0], inputs[2][0, 0].mean(0), rtol=0, atol=1e-6)
    assert all(np.isfinite(g).all() for g in gradients)


def test_masks_with_a_window_show_the_last_tokens():
    causal = ops.causal_mask(4, None, window=2)
    cache = ops.cache_mask(jnp.array([[2]]), 5, window=2)

    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    np.testing.assert_array_equal(causal[0], np.array(expected, bool))
    np.testing.assert_array_equal(cache[0], np.array([[0, 1, 1, 0, 0]], bool))


def test_causal_mask_joins_time_and_segments():
    mask = ops.causal_mask(4, jnp.array([[1, 1, 2, 0]]))

    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(mask[0], np.array(expected, bool))


def test_cache_mask_shows_entries_up_to_the_own_position():
    mask = ops.cache_mask(jnp.array([[0, 2]]), 4)

    np.testing.assert_array_equal(mask[0], np.array([[1, 0, 0, 0], [1, 1, 1, 0]], bool))


def test_write_cache_rows_and_slots_get_their_own_token():
    cache = jnp.zeros((2, 1, 4, 2))
    new = jnp.arange(1.0, 9.0).reshape(2, 2, 1, 2)

    written = ops.write_cache(cache, new, jnp.array([[1, 3], [0, 4]]))

    expected = np.zeros((2, 1, 4, 2))
    expected[0, 0, 1], expected[0, 0, 3], expected[1, 0, 0] = [1, 2], [3, 4], [5, 6]
    np.testing.assert_array_equal(written, expected)  # slot 4 lies outside: not written


def test_write_cache_of_all_layers_touches_one_layer():
    cache = jnp.zeros((3, 1, 1, 4, 2))
    new = jnp.ones((1, 1, 1, 2))

    written = ops.write_cache(cache, new, jnp.array([[2]]), jnp.int32(1))

    expected = np.zeros((3, 1, 1, 4, 2))
    expected[1, 0, 0, 2] = 1
    np.testing.assert_array_equal(written, expected)
