"""The decoder equals a plain numpy forward in float64, written here from the papers alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl.models.model import forward, unembed


def _rms_norm(x, weights, config):
    scale = weights["scale"] + (1.0 if config.norm_offset else 0.0)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale


def _cap(x, cap):
    return cap * np.tanh(x / cap) if cap else x


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


def _attention(x, weights, positions, config, windowed):
    """One sequence x [T, D] -> [T, D]: one head, one query at a time."""
    n_tokens, repeat = len(x), config.n_heads // config.n_kv_heads
    theta = config.local_rope_theta if windowed and config.local_rope_theta else config.rope_theta
    out = np.zeros_like(x)
    for head in range(config.n_heads):
        sides = []
        for name, index in (("query", head), ("key", head // repeat), ("value", head // repeat)):
            side = x @ weights[name][index].T
            if config.qkv_bias:
                side = side + weights[f"{name}_bias"][index]
            if config.qk_norm and name != "value":
                side = _rms_norm(side, weights[f"{name}_norm"], config)
            if name != "value":
                side = np.stack(
                    [_rotate(q, p, theta) for q, p in zip(side, positions, strict=True)]
                )
            sides.append(side)
        query, key, value = sides
        for t in range(n_tokens):
            first = max(0, t + 1 - config.sliding_window) if windowed else 0
            scores = key[first : t + 1] @ query[t] / np.sqrt(config.query_scale or config.head_dim)
            scores = _cap(scores, config.attention_softcap)
            exps = np.exp(scores - scores.max())
            mixed = (exps / exps.sum()) @ value[first : t + 1]
            out[t] += mixed @ weights["out"][:, head].T
    return out


def _activate(x, config):
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _mlp(x, weights, config):
    inner = _activate(x @ weights["gate"].T, config) * (x @ weights["up"].T)
    return inner @ weights["down"].T


def _experts(x, weights, config):
    """One token at a time, its best experts one after the other."""
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        scores = np.exp(weights["router"] @ token)
        shares = scores / scores.sum()
        best = np.argsort(-shares)[: config.experts_per_token]
        total = shares[best].sum() if config.normalize_experts else 1.0
        for e in best:
            expert = {name: weights[name][e] for name in ("gate", "up", "down")}
            out[t] += shares[e] / total * _mlp(token, expert, config)
    return out


def _layer(x, layer, positions, config, windowed):
    normed = _rms_norm(x, layer["attention_norm"], config)
    mixed = _attention(normed, layer["attention"], positions, config, windowed)
    if config.post_norms:
        mixed = _rms_norm(mixed, layer["attention_post_norm"], config)
    x = x + mixed
    part = _experts if config.n_experts else _mlp
    inner = part(_rms_norm(x, layer["mlp_norm"], config), layer["mlp"], config)
    if config.post_norms:
        inner = _rms_norm(inner, layer["mlp_post_norm"], config)
    return x + inner


def _reference_logits(params, config, tokens, positions):
    """One sequence: tokens, positions [T] -> logits [T, V] in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = params["embedding"][tokens]
    if config.scale_embedding:
        x = x * np.sqrt(config.d_model)
    for i in range(config.n_layers):
        every = config.global_every
        windowed = config.sliding_window > 0 and not (every and i % every == every - 1)
        x = _layer(x, params["layers"][str(i)], positions, config, windowed)
    x = _rms_norm(x, params["final_norm"], config)
    logits = x @ params["embedding" if config.tie_embeddings else "unembedding"].T
    return _cap(logits, config.logits_softcap)


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
    "gelu": {"activation": "gelu"},
    "norms": {"norm_offset": True, "post_norms": True, "qk_norm": True},
    "scales": {"scale_embedding": True, "query_scale": 3.0},
    "caps": {"attention_softcap": 0.5, "logits_softcap": 1.0},
    "windows": {"sliding_window": 3},
    "some windows": {
        "n_layers": 3,
        "sliding_window": 3,
        "global_every": 2,
        "local_rope_theta": 9.0,
    },
    "few experts": {"n_experts": 4},
    "many experts": {"n_experts": 10, "experts_per_token": 2, "normalize_experts": False},
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
