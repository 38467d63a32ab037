"""Rotary positions, grouped-query attention and writes into the KV cache, as functions of
arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a row without any visible key must give a number, and gradients too


def rope_tables(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """positions [B, T] -> (cos, sin) float32 [B, T, H/2] of the angles position * theta^(-2i/H).

    Su et al. 2021, "RoFormer", eq. 15. Computed once for all layers.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions[..., None].astype(jnp.float32) * (1.0 / theta**exponents)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [B, T, N, H], cos and sin [B, T, H/2] -> x [B, T, N, H] with each pair (i, i + H/2) turned.

    The pairing of halves is the one of Llama's published weights.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def causal_mask(length: int, segment_ids: jax.Array | None) -> jax.Array:
    """segment_ids [B, T] or None -> bool [B or 1, T, S=T]: earlier or same, and of the same
    segment."""
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))[None]
    if segment_ids is None:
        return causal
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def cache_mask(positions: jax.Array, length: int) -> jax.Array:
    """positions [B, T] -> bool [B, T, S=length]: cache entries up to the query's own position."""
    return jnp.arange(length) <= positions[:, :, None]


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """query [B, T, N, H], keys and values [B, K, S, H], mask [B or 1, T, S] -> [B, T, N, H].

    N is a multiple of K; query head n reads key head n // (N/K) (Ainslie et al. 2023, GQA). Softmax
    in float32. A query that sees no key gets the mean of all values, never NaN.
    """
    batch, length, n_heads, head_dim = query.shape
    n_kv_heads = keys.shape[1]
    grouped = query.reshape(batch, length, n_kv_heads, n_heads // n_kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bksh->bkgts", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bkgts,bksh->btkgh", weights, values)
    return mixed.reshape(batch, length, n_heads, head_dim)


def write_cache(
    cache: jax.Array, new: jax.Array, slots: jax.Array, layer: jax.Array | None = None
) -> jax.Array:
    """cache [B, K, S, H] (or [L, B, K, S, H] with `layer`), new [B, T, K, H], slots [B, T] ->
    cache.

    Row b, token t goes to cache entry slots[b, t]; slots outside 0 … S-1 are not written.
    """
    rows = jnp.arange(new.shape[0])[:, None]
    where = (rows, slice(None), slots) if layer is None else (layer, rows, slice(None), slots)
    return cache.at[where].set(new.astype(cache.dtype), mode="drop")
