"""Grouped-query attention and writes into the KV cache, as functions of arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_CHUNK = 64  # queries
_MAX_CHUNKS = 8  # chunks are unrolled: more would make the program long
MASKED = -1e30  # finite: a row without any visible key must give a number, and gradients too


def causal_mask(length: int, segment_ids: jax.Array | None, window: int = 0) -> jax.Array:
    """segment_ids [B, T] or None -> bool [B or 1, T, S=T]: earlier or same, and of the same
    segment; with a `window`, among the last so many tokens, itself counted."""
    earlier = jnp.arange(length)[:, None] - jnp.arange(length)
    causal = (earlier >= 0)[None]
    if window:
        causal &= (earlier < window)[None]
    if segment_ids is None:
        return causal
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def cache_mask(positions: jax.Array, length: int, window: int = 0) -> jax.Array:
    """positions [B, T] -> bool [B, T, S=length]: cache entries up to the query's own position, with
    a `window` the last so many of them."""
    entries, own = jnp.arange(length), positions[:, :, None]
    mask = entries <= own
    return mask & (entries > own - window) if window else mask


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """x squeezed smoothly into (-cap, cap): cap * tanh(x / cap); 0 leaves it as it is.

    Gemma Team 2024, "Gemma 2", section 2.
    """
    return cap * jnp.tanh(x / cap) if cap else x


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """query [B, T, N, H], keys and values [B, K, S, H], mask [B or 1, T, S] -> [B, T, N, H].

    N is a multiple of K; query head n reads key head n // (N/K) (Ainslie et al. 2023, GQA). Scores
    are multiplied by `scale` (None: H^-0.5) and capped by `softcap`; softmax in float32. A query
    that sees no key gets the mean of values, never NaN. `causal` promises that T = S and that
    `mask` hides every later key, and `window` that it hides all but the last so many, so that these
    need not be looked at.
    """
    batch, length, n_heads, head_dim = query.shape
    n_kv_heads = keys.shape[1]
    grouped = query.reshape(batch, length, n_kv_heads, n_heads // n_kv_heads, head_dim)
    grouped = grouped * (head_dim**-0.5 if scale is None else scale)
    if length == 1:
        on_cpu = attend_by_head
    elif causal and length > _CHUNK:
        on_cpu = functools.partial(attend_by_chunk, window=window)
    else:
        on_cpu = attend_by_group
    mixed = jax.lax.platform_dependent(
        grouped,
        keys,
        values,
        mask,
        cpu=functools.partial(on_cpu, cap=cap),
        default=functools.partial(attend_by_group, cap=cap),
    )
    return mixed.reshape(batch, length, n_heads, head_dim)


def attend_by_group(
    query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, *, cap: float = 0.0
) -> jax.Array:
    """`attend` for scaled query [B, T, K, G, H]: the heads of a group share one pass over the
    keys."""
    scores = jnp.einsum("btkgh,bksh->bkgts", query, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], softcap(scores, cap), MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bkgts,bksh->btkgh", weights.astype(values.dtype), values)


def attend_by_chunk(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    window: int = 0,
    cap: float = 0.0,
) -> jax.Array:
    """`attend_by_group` for a causal mask on CPU: some queries at a time and the keys up to them.

    Their scores stay in the processor's cache, and about half of them are never computed.
    """
    length = query.shape[1]
    width = max(_CHUNK, -(-length // _MAX_CHUNKS))
    parts = []
    for start in range(0, length, width):
        rows = slice(start, start + width)
        seen = slice(max(0, start - window + 1) if window else 0, start + width)
        parts.append(
            attend_by_group(
                query[:, rows], keys[:, :, seen], values[:, :, seen], mask[:, rows, seen], cap=cap
            )
        )
    return jnp.concatenate(parts, axis=1)


def attend_by_head(
    query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, *, cap: float = 0.0
) -> jax.Array:
    """`attend_by_group` for T = 1 on CPU: matrix-vector products, one head of each group at a time.

    XLA:CPU runs these about twice as fast as the grouped products with their few rows.
    """
    heads = []
    for g in range(query.shape[3]):
        scores = jnp.einsum(
            "bkh,bksh->bks", query[:, 0, :, g], keys, preferred_element_type=jnp.float32
        )
        weights = jax.nn.softmax(jnp.where(mask, softcap(scores, cap), MASKED), axis=-1)
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
