"""Attention of a piece of a prompt over itself and over what a cache holds from before it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.models.attention import MASKED, softcap


@dataclasses.dataclass(frozen=True)
class Prior:
    """What stands before a piece: row r follows the first `length[r]` entries of cache row
    `rows[r]`.

    rows, length int32 [B]; every length is a multiple of `block`, and the cache's length too.
    `split`: the cache's rows lie on different devices.
    """

    rows: jax.Array
    length: jax.Array
    block: int
    split: bool = False


def attend_after(
    query: jax.Array,
    own: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    prior: Prior,
    *,
    layer: jax.Array | None = None,
    window: int | jax.Array = 0,
    scale: float | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """query [B, T, N, H], own keys and values [B, K, T, H], mask [B or 1, T, T] -> [B, T, N, H].

    `cache` holds keys and values [C, K, S, H] (or [L, C, K, S, H] with `layer`). Token t of row r
    stands at position `prior.length[r] + t`; with a `window` (0: none) it sees the last so many
    tokens. The cache is read block by block up to the longest prior, with one running softmax
    (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"), so that one program
    serves all lengths; blocks that a row does not see change nothing of it.
    """
    batch, length, n_heads, head_dim = query.shape
    n_kv_heads = own[0].shape[1]
    grouped = query.reshape(batch, length, n_kv_heads, n_heads // n_kv_heads, head_dim)
    grouped = grouped * (head_dim**-0.5 if scale is None else scale)
    positions = prior.length[:, None, None] + jnp.arange(length)[:, None]

    def look(keys: jax.Array, visible: jax.Array) -> jax.Array:
        scores = jnp.einsum("btkgh,bksh->bkgts", grouped, keys, preferred_element_type=jnp.float32)
        return jnp.where(visible[:, None, None], softcap(scores, cap), MASKED)

    def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
        weights = weights.astype(values.dtype)
        return jnp.einsum("bkgts,bksh->bkgth", weights, values, preferred_element_type=jnp.float32)

    def block(index: jax.Array, carry: tuple) -> tuple:
        top, total, mixed = carry
        start = index * prior.block
        keys, values = (_take(side, prior, start, layer) for side in cache)
        entry = start + jnp.arange(prior.block)
        near = (window == 0) | (entry > positions - window)
        scores = look(keys, (entry < prior.length[:, None, None]) & near)
        highest = jnp.maximum(top, jnp.max(scores, axis=-1))
        shrink, weights = jnp.exp(top - highest), jnp.exp(scores - highest[..., None])
        total = total * shrink + jnp.sum(weights, axis=-1)
        return highest, total, mixed * shrink[..., None] + mix(weights, values)

    # The piece itself comes first: every token sees itself, so that the maximum is a real score.
    scores = look(own[0], mask)
    top = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - top[..., None])
    start = (top, jnp.sum(weights, axis=-1), mix(weights, own[1]))
    blocks = (jnp.max(prior.length) + prior.block - 1) // prior.block
    _, total, mixed = lax.fori_loop(0, blocks, block, start)
    mixed = (mixed / total[..., None]).astype(query.dtype)
    return jnp.moveaxis(mixed, 3, 1).reshape(batch, length, n_heads, head_dim)


def _take(side: jax.Array, prior: Prior, start: jax.Array, layer: jax.Array | None) -> jax.Array:
    """The block from `start` of each row's cache: [B, K, block, H]."""
    if prior.split:
        if layer is not None:
            side = lax.dynamic_index_in_dim(side, layer, 0, keepdims=False)
        part = lax.dynamic_slice_in_dim(side, start, prior.block, axis=2)
        return jnp.stack([pick_row(part, row) for row in prior.rows])
    lead = () if layer is None else (layer,)
    shape = (*(1 for _ in lead), 1, side.shape[-3], prior.block, side.shape[-1])
    blocks = [lax.dynamic_slice(side, (*lead, row, 0, start, 0), shape) for row in prior.rows]
    return jnp.stack([block.reshape(shape[-3:]) for block in blocks])


def pick_row(x: jax.Array, row: jax.Array) -> jax.Array:
    """Row `row` of x [C, ...] whose rows lie on different devices: a sum, where an index would
    gather all of them. What the other rows hold, even NaN, plays no part."""
    here = jnp.arange(x.shape[0]).reshape(-1, *(1,) * (x.ndim - 1)) == row
    return jnp.sum(jnp.where(here, x, 0), axis=0)
