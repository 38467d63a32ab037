"""Rotary positions, grouped-query attention and writes into the KV cache, as functions of
arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_CHUNK = 64  # queries
_MAX_CHUNKS = 8  # chunks are unrolled: more would make the program long
_MASKED = -1e30  # finite: a row without any visible key must give a number, and gradients too


def rope_tables(
    positions: jax.Array, head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> tuple[jax.Array, jax.Array]:
    """positions [B, T] -> (cos, sin) float32 [B, T, H/2] of the angles position * theta^(-2i/H).

    Su et al. 2021, "RoFormer", eq. 15. Computed once for all layers. `scaling` is
    `ModelConfig.rope_scaling`: frequencies are multiplied by `frequency_factors`.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling:
        frequencies *= frequency_factors(head_dim, theta, scaling)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def frequency_factors(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """By how much each of the H/2 rotary frequencies is slowed down; float32 [H/2].

    "linear": all by 1/factor (Chen et al. 2023, "Extending context window"). "llama3" (Llama 3.1):
    those that turn fewer than `low_freq_factor` times within the original length by 1/factor, those
    that turn more than `high_freq_factor` times not at all, and between them a straight line in the
    number of turns.
    """
    slow = 1.0 / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return np.full(head_dim // 2, slow, np.float32)
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (slow + (1.0 - slow) * share).astype(np.float32)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [B, T, N, H], cos and sin [B, T, H/2] -> x [B, T, N, H] with each pair (i, i + H/2) turned.

    The pairing of halves is the one of Llama's published weights.
    """
    cos = jnp.concatenate([cos, cos], axis=-1)[:, :, None]
    sin = jnp.concatenate([-sin, sin], axis=-1)[:, :, None]
    wide = x.astype(jnp.float32)
    # Rolling by half a head puts each number's partner in its place.
    turned = wide * cos + jnp.roll(wide, x.shape[-1] // 2, axis=-1) * sin
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


def attend(
    query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, *, causal: bool = False
) -> jax.Array:
    """query [B, T, N, H], keys and values [B, K, S, H], mask [B or 1, T, S] -> [B, T, N, H].

    N is a multiple of K; query head n reads key head n // (N/K) (Ainslie et al. 2023, GQA). Softmax
    in float32. A query that sees no key gets the mean of values, never NaN. `causal` promises that
    T = S and that `mask` hides every later key, so that these need not be looked at.
    """
    batch, length, n_heads, head_dim = query.shape
    n_kv_heads = keys.shape[1]
    grouped = query.reshape(batch, length, n_kv_heads, n_heads // n_kv_heads, head_dim)
    grouped = grouped * head_dim**-0.5
    if length == 1:
        on_cpu = attend_by_head
    elif causal and length > _CHUNK:
        on_cpu = attend_by_chunk
    else:
        on_cpu = attend_by_group
    mixed = jax.lax.platform_dependent(
        grouped, keys, values, mask, cpu=on_cpu, default=attend_by_group
    )
    return mixed.reshape(batch, length, n_heads, head_dim)


def attend_by_group(
    query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> jax.Array:
    """`attend` for scaled query [B, T, K, G, H]: the heads of a group share one pass over the
    keys."""
    scores = jnp.einsum("btkgh,bksh->bkgts", query, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, _MASKED), axis=-1)
    return jnp.einsum("bkgts,bksh->btkgh", weights.astype(values.dtype), values)


def attend_by_chunk(
    query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> jax.Array:
    """`attend_by_group` for a causal mask on CPU: some queries at a time and the keys up to them.

    Their scores stay in the processor's cache, and about half of them are never computed.
    """
    length = query.shape[1]
    width = max(_CHUNK, -(-length // _MAX_CHUNKS))
    parts = []
    for start in range(0, length, width):
        rows = slice(start, start + width)
        seen = slice(0, start + width)
        parts.append(
            attend_by_group(
                query[:, rows], keys[:, :, seen], values[:, :, seen], mask[:, rows, seen]
            )
        )
    return jnp.concatenate(parts, axis=1)


def attend_by_head(
    query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> jax.Array:
    """`attend_by_group` for T = 1 on CPU: matrix-vector products, one head of each group at a time.

    XLA:CPU runs these about twice as fast as the grouped products with their few rows.
    """
    heads = []
    for g in range(query.shape[3]):
        scores = jnp.einsum(
            "bkh,bksh->bks", query[:, 0, :, g], keys, preferred_element_type=jnp.float32
        )
        weights = jax.nn.softmax(jnp.where(mask, scores, _MASKED), axis=-1)
        heads.append(jnp.einsum("bks,bksh->bkh", weights.astype(values.dtype), values))
    return jnp.stack(heads, axis=2)[:, None]


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
