"""Prefill and decode over the KV cache give the numbers of the full forward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.model import KVCache, forward, init_cache

SCAN = pytest.mark.parametrize("scan_layers", [False, True])


@SCAN
def test_prefill_then_decode_rows_of_different_lengths_equal_full_forward(
    make_model, make_tokens, run, scan_layers
):
    model, params = make_model(scan_layers=scan_layers, qk_norm=True)
    tokens, positions = make_tokens(2, 16)
    expected, _ = run(model, params, tokens, positions)
    lengths = jnp.array([3, 8])

    # Both prompts are padded to 8: entries behind the shorter one hold rubbish until overwritten.
    padded = jnp.where(positions[:, :8] < lengths[:, None], tokens[:, :8], 63)
    cache = init_cache(model, 2, 16)
    prefilled, cache = run(model, params, padded, positions[:, :8], None, cache)
    rows, decoded = jnp.arange(2), []
    for i in range(8):
        at = lengths + i
        hidden, cache = run(model, params, tokens[rows, at][:, None], at[:, None], None, cache)
        decoded.append(hidden)

    decoded = jnp.concatenate(decoded, axis=1)
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(prefilled[row, :n], expected[row, :n], rtol=0, atol=1e-5)
        np.testing.assert_allclose(decoded[row], expected[row, n : n + 8], rtol=0, atol=1e-5)


@SCAN
@pytest.mark.parametrize("pieces", [[1] * 16, [8, 8], [1, 1, 8, 1, 1, 1, 1, 1, 1]])
def test_cache_filled_in_any_pieces_equals_full_forward(
    make_model, make_tokens, run, scan_layers, pieces
):
    model, params = make_model(scan_layers=scan_layers, qk_norm=True)
    tokens, positions = make_tokens(2, 16)
    expected, _ = run(model, params, tokens, positions)

    cache, hidden, start = init_cache(model, 2, 16), [], 0
    for piece in pieces:
        span = slice(start, start + piece)
        out, cache = run(model, params, tokens[:, span], positions[:, span], None, cache)
        hidden.append(out)
        start += piece

    np.testing.assert_allclose(jnp.concatenate(hidden, 1), expected, rtol=0, atol=1e-5)


@SCAN
def test_write_mask_inactive_rows_keep_their_cache_bit_for_bit(
    make_model, make_tokens, run, scan_layers
):
    model, params = make_model(scan_layers=scan_layers, qk_norm=True)
    tokens, positions = make_tokens(2, 8)
    _, cache = run(model, params, tokens, positions, None, init_cache(model, 2, 16))
    new, at = tokens[:, :1], jnp.full((2, 1), 4)
    active = jnp.array([True, False])

    hidden, masked = run(model, params, new, at, None, cache, write_mask=active)
    hidden_all, written = run(model, params, new, at, None, cache)

    row = lambda tree, i: jax.tree.map(lambda x: np.asarray(x)[..., i, :, :, :], tree)
    jax.tree.map(np.testing.assert_array_equal, row(masked, 1), row(cache, 1))
    jax.tree.map(np.testing.assert_array_equal, row(masked, 0), row(written, 0))
    np.testing.assert_array_equal(hidden[0], hidden_all[0])
    assert any(np.abs(a - b).max() > 0 for a, b in _leaves(row(written, 1), row(cache, 1)))


def _leaves(first, second):
    return zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)


@SCAN
def test_attend_length_beyond_every_position_changes_nothing(
    make_model, make_tokens, run, scan_layers
):
    model, params = make_model(scan_layers=scan_layers, qk_norm=True)
    tokens, positions = make_tokens(2, 8)
    cache = jax.tree.map(lambda x: jnp.full_like(x, 9.0), init_cache(model, 2, 16))

    short, short_cache = run(model, params, tokens, positions, None, cache, attend_length=8)
    full, full_cache = run(model, params, tokens, positions, None, cache)

    np.testing.assert_allclose(short, full, rtol=0, atol=1e-6)
    assert jax.tree.map(jnp.shape, short_cache) == jax.tree.map(jnp.shape, cache)
    for a, b in _leaves(short_cache, full_cache):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_decode_position_beyond_the_cache_is_not_written(make_model, make_tokens, run):
    model, params = make_model(scan_layers=False, qk_norm=True)
    tokens, _ = make_tokens(2, 1)
    cache = init_cache(model, 2, 16)

    _, written = run(model, params, tokens, jnp.array([[16], [99]]), None, cache)

    jax.tree.map(np.testing.assert_array_equal, written, cache)


def test_init_cache_layout_and_dtype(make_model):
    unrolled = init_cache(make_model()[0], 3, 10)
    scanned = init_cache(make_model(scan_layers=True, dtype="bfloat16")[0], 3, 10)

    assert isinstance(unrolled, KVCache)
    assert [x.shape for x in unrolled.keys] == [(3, 2, 10, 8)] * 2
    assert scanned.values.shape == (2, 3, 2, 10, 8)
    assert scanned.values.dtype == jnp.bfloat16
    assert (unrolled.length, scanned.length) == (10, 10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attend_length": 9}, "attend_length=9.*4 tokens.*8 entries"),
        ({"attend_length": 2}, "attend_length=2"),
        ({"segment_ids": jnp.ones((2, 4), jnp.int32)}, "segment_ids"),
        ({"cache": None, "attend_length": 4}, "need a cache"),
        ({"cache": None, "write_mask": jnp.ones(2, bool)}, "need a cache"),
    ],
)
def test_forward_contradictory_arguments_are_errors(make_model, make_tokens, options, words):
    model, params = make_model()
    tokens, positions = make_tokens(2, 4)
    arguments = {"cache": init_cache(model, 2, 8), "segment_ids": None, **options}

    with pytest.raises(ValueError, match=words):
        forward(model, params, tokens, positions, **arguments)


def test_forward_more_tokens_than_cache_entries_is_an_error(make_model, make_tokens):
    model, params = make_model()
    tokens, positions = make_tokens(2, 9)

    with pytest.raises(ValueError, match="9 tokens.*8 entries"):
        forward(model, params, tokens, positions, None, init_cache(model, 2, 8))
