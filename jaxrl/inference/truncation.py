"""Top-k and top-p without sorting: the threshold is found bit by bit, which any device can do.

A float32 is read as an unsigned integer of the same order; 32 rounds of comparing and summing over
the vocabulary fix its bits, highest first.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def keep_mask(scaled: jax.Array, mass: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """scaled, mass float32 [B, V], top_k int32 [B] (0: all), top_p float32 [B] -> bool [B, V].

    `mass` is the unnormalised probability of each token and `scaled` its logarithm up to a
    constant. Kept are the `top_k` most likely tokens, and of those the fewest, most likely first,
    that hold at least `top_p` of their mass. Tokens as likely as the last one kept are kept too;
    the most likely one always is.
    """
    keys = _sortable(scaled)
    lowest = lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        lambda: _thresholds(keys, mass, top_k, top_p),
        lambda: jnp.zeros(top_k.shape, jnp.uint32),
    )
    return keys >= lowest[:, None]


def _thresholds(keys: jax.Array, mass: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The lowest key that is kept, uint32 [B]."""
    wanted = jnp.where(top_k > 0, top_k, keys.shape[-1])
    by_rank = _highest(lambda t: jnp.sum(keys >= t[:, None], axis=-1) >= wanted, wanted.shape)
    left = jnp.where(keys >= by_rank[:, None], mass, 0.0)
    # Where rounding lets no threshold reach the share, as for a top_p just below 1, all are kept.
    share = top_p * jnp.sum(left, axis=-1)

    def enough(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(keys >= threshold[:, None], left, 0.0), axis=-1) >= share

    by_mass = jnp.where(top_p < 1, _highest(enough, wanted.shape), jnp.uint32(0))
    return jnp.maximum(by_rank, by_mass)


def _highest(enough: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The highest uint32 of each row for which `enough` holds, where it holds for all lower ones;
    0 if for none."""

    def fix_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(candidate), candidate, found)

    return lax.fori_loop(0, 32, fix_bit, jnp.zeros(shape, jnp.uint32))


def _sortable(x: jax.Array) -> jax.Array:
    """float32 -> uint32 of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)
