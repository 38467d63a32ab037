"""The decoder equals a plain numpy forward in float64, written here from the papers alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl.models.model import forward, unembed


def _rms_norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _rotate(x, position, theta):
    """x [H] at one position: pair (i, i + H/2) turned by position * theta^(-2i/H)."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        cos, sin = np.cos(angle), np.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def _attention(x, weights, positions, config):
    """One sequence x [T, D] -> [T, D]: one head, one query at a time."""
    n_tokens, repeat = len(x), config.n_heads // config.n_kv_heads
    out = np.zeros_like(x)
    for head in range(config.n_heads):
        query = x @ weights["query"][head].T
        key = x @ weights["key"][head // repeat].T
        value = x @ weights["value"][head // repeat].T
        if config.qkv_bias:
            query = query + weights["query_bias"][head]
            key = key + weights["key_bias"][head // repeat]
            value = value + weights["value_bias"][head // repeat]
        if config.qk_norm:
            query = _rms_norm(query, weights["query_norm"]["scale"], config.norm_eps)
            key = _rms_norm(key, weights["key_norm"]["scale"], config.norm_eps)
        query = np.stack(
            [_rotate(q, p, config.rope_theta) for q, p in zip(query, positions, strict=True)]
        )
        key = np.stack(
            [_rotate(k, p, config.rope_theta) for k, p in zip(key, positions, strict=True)]
        )
        for t in range(n_tokens):
            scores = key[: t + 1] @ query[t] / np.sqrt(config.head_dim)
            exps = np.exp(scores - scores.max())
            mixed = (exps / exps.sum()) @ value[: t + 1]
            out[t] += mixed @ weights["out"][:, head].T
    return out


def _mlp(x, weights):
    gate = x @ weights["gate"].T
    return (gate / (1 + np.exp(-gate)) * (x @ weights["up"].T)) @ weights["down"].T


def _reference_logits(params, config, tokens, positions):
    """One sequence: tokens, positions [T] -> logits [T, V] in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = params["embedding"][tokens]
    for i in range(config.n_layers):
        layer = params["layers"][str(i)]
        normed = _rms_norm(x, layer["attention_norm"]["scale"], config.norm_eps)
        x = x + _attention(normed, layer["attention"], positions, config)
        normed = _rms_norm(x, layer["mlp_norm"]["scale"], config.norm_eps)
        x = x + _mlp(normed, layer["mlp"])
    x = _rms_norm(x, params["final_norm"]["scale"], config.norm_eps)
    return x @ params["embedding" if config.tie_embeddings else "unembedding"].T


VARIANTS = {
    "plain": {},
    "qkv_bias": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True},
    "untied": {"tie_embeddings": False},
    "theta": {"rope_theta": 50.0},
    "eps": {"norm_eps": 0.1, "qk_norm": True},
    "every head its own": {"n_kv_heads": 4},
    "one kv head": {"n_kv_heads": 1},
    "deep": {"n_layers": 11},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_equals_numpy_reference(make_model, make_tokens, variant):
    model, params = make_model(**VARIANTS[variant])
    tokens, positions = make_tokens(2, 8)

    hidden, cache = forward(model, params, tokens, positions)
    logits = unembed(model, params, hidden)

    assert cache is None
    for row in range(2):
        expected = _reference_logits(params, model.config, tokens[row], positions[row])
        np.testing.assert_allclose(logits[row], expected, rtol=0, atol=2e-5)


def test_forward_packed_segments_equal_separate_sequences(make_model, packed_batch):
    model, params = make_model(qk_norm=True)
    tokens, positions, segment_ids = packed_batch

    logits = unembed(model, params, forward(model, params, tokens, positions, segment_ids)[0])

    for row, start, stop in [(0, 0, 3), (0, 3, 5), (1, 0, 8)]:
        expected = _reference_logits(
            params, model.config, tokens[row, start:stop], np.arange(stop - start)
        )
        np.testing.assert_allclose(logits[row, start:stop], expected, rtol=0, atol=2e-5)


def test_forward_other_segment_and_padding_have_no_influence(make_model, packed_batch):
    model, params = make_model()
    tokens, positions, segment_ids = packed_batch
    hidden, _ = forward(model, params, tokens, positions, segment_ids)

    changed = tokens.at[0, :3].set(1).at[0, 5:].set(3)
    hidden_changed, _ = forward(model, params, changed, positions, segment_ids)

    np.testing.assert_array_equal(hidden[0, 3:5], hidden_changed[0, 3:5])
    assert np.abs(hidden[0, :3] - hidden_changed[0, :3]).max() > 0.1


def test_forward_positions_matter_only_relative_to_each_other(make_model, make_tokens):
    model, params = make_model()
    tokens, positions = make_tokens(2, 8)
    hidden, _ = forward(model, params, tokens, positions)

    shifted, _ = forward(model, params, tokens, positions + 17)
    stretched, _ = forward(model, params, tokens, positions * 3)

    np.testing.assert_allclose(shifted, hidden, rtol=0, atol=1e-5)
    assert np.abs(stretched - hidden).max() > 1e-2


def test_forward_other_theta_gives_other_numbers(make_model, make_tokens):
    model, params = make_model()
    other, _ = make_model(rope_theta=100.0)
    tokens, positions = make_tokens(2, 8)

    difference = (
        forward(model, params, tokens, positions)[0] - forward(other, params, tokens, positions)[0]
    )

    assert np.abs(difference).max() > 1e-2


@pytest.mark.parametrize("scan_layers", [False, True])
def test_forward_bfloat16_is_close_to_float32(make_model, make_tokens, scan_layers):
    full, params = make_model(scan_layers=scan_layers, qk_norm=True)
    half, _ = make_model(
        scan_layers=scan_layers, qk_norm=True, dtype="bfloat16", param_dtype="bfloat16"
    )
    half_params = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    tokens, positions = make_tokens(2, 8)

    hidden, _ = forward(half, half_params, tokens, positions)
    logits = unembed(half, half_params, hidden)

    assert hidden.dtype == "bfloat16"
    assert logits.dtype == "float32"
    expected = unembed(full, params, forward(full, params, tokens, positions)[0])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=0.15)


def test_forward_float32_weights_bfloat16_compute_keeps_weights(make_model, make_tokens):
    model, params = make_model(dtype="bfloat16")
    tokens, positions = make_tokens(2, 8)

    hidden, _ = forward(model, params, tokens, positions)

    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert hidden.dtype == "bfloat16"
