"""Draws the next token of every row and records its log-probability: pure functions of arrays.

Sampling inverts the cumulative distribution with one uniform number per row. Gumbel noise would
need one random number per vocabulary entry, and costs ten times as much on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.inference.truncation import keep_mask

_BLOCK = 32
"""Vocabulary entries summed together in the first level of the search; measured best on CPUs."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Of Threefry-2x32, in bits."""

_SMALL = 512
"""Up to this many blocks, a triangular matrix product beats a cumulative sum."""


def seed_words(seed: int) -> np.ndarray:
    """Any Python int -> uint32 [2]: the high and low words of the seed modulo 2**64."""
    seed %= 1 << 64
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


class How(NamedTuple):
    """How each row is sampled: temperature, top_p float32 [B], top_k int32 [B] (0: all tokens),
    seed uint32 [B, 2], and `alternatives` int32 [B], how many of the most likely tokens to tell."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    alternatives: jax.Array


class Drawn(NamedTuple):
    """token int32 [B] and its log-probability logp float32 [B]; the N most likely tokens
    top_tokens int32 [B, N] with top_logps float32 [B, N], -1 where a row wants fewer."""

    token: jax.Array
    logp: jax.Array
    top_tokens: jax.Array
    top_logps: jax.Array


def sample_tokens(
    logits: jax.Array, temperature: jax.Array, seed: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """logits [B, V], temperature float32 [B], seed uint32 [B, 2], position int32 [B]
    -> token int32 [B], logp float32 [B]: `draw` from all tokens."""
    zeros = jnp.zeros(position.shape, jnp.int32)
    how = How(temperature, zeros, jnp.ones(position.shape, jnp.float32), seed, zeros)
    return draw(logits, how, position)[:2]


def draw(logits: jax.Array, how: How, position: jax.Array, *, alternatives: int = 0) -> Drawn:
    """logits [B, V], position int32 [B] -> what was drawn; N is `alternatives`.

    `position` is the index of the drawn token in its sequence; with the seed it is all that the
    draw depends on besides the row's own logits. `logp` is the log-probability of the token under
    the distribution that was sampled from: softmax(logits / temperature), cut by top-k and top-p
    and renormalised. Temperature 0 takes the most likely token and records its log-probability at
    temperature 1, uncut. Alternatives that were cut off have log-probability -inf.
    """
    logits = logits.astype(jnp.float32)
    greedy = how.temperature <= 0
    # Below 0 before the division, so that a small temperature gives -inf at worst, which is right.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = below / jnp.where(greedy, 1.0, how.temperature)[:, None]
    mass = jnp.exp(scaled)
    top_k, top_p = jnp.where(greedy, 0, how.top_k), jnp.where(greedy, 1.0, how.top_p)
    kept = keep_mask(scaled, mass, top_k, top_p)
    drawn, total = _invert(jnp.where(kept, mass, 0.0), _uniform(how.seed, position))
    token = jnp.where(greedy, _first(scaled >= 0), drawn)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    shift = jnp.log(total)
    best = _most_likely(scaled, kept, shift, how.alternatives, alternatives)
    return Drawn(token, chosen - shift, *best)


def _most_likely(
    scaled: jax.Array, kept: jax.Array, shift: jax.Array, wanted: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """The `most` most likely tokens int32 [B, most] and their log-probabilities, most likely first;
    nothing is computed unless some row wants them."""
    shape = (scaled.shape[0], most)
    none = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)
    if not most:
        return none

    def find() -> tuple[jax.Array, jax.Array]:
        values, tokens = lax.top_k(scaled, most)
        cut = ~jnp.take_along_axis(kept, tokens, axis=-1)
        logps = jnp.where(cut, -jnp.inf, values - shift[:, None])
        asked = jnp.arange(most) < wanted[:, None]
        return jnp.where(asked, tokens, none[0]), jnp.where(asked, logps, none[1])

    return lax.cond(jnp.any(wanted > 0), find, lambda: none)


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """seed uint32 [B, 2], position int32 [B] -> float32 [B] in [0, 1), 24 random bits each.

    Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
    of the counter (position, 0) under the key `seed`. `jax.random` would compute the same kind of
    numbers, but in loops that cost more than the rest of the sampling.
    """
    key = [seed[:, 0], seed[:, 1]]
    key.append(key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    left, right = position.astype(jnp.uint32) + key[0], key[1]
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            left = left + right
            right = ((right << turn) | (right >> (32 - turn))) ^ left
        left = left + key[(group + 1) % 3]
        right = right + key[(group + 2) % 3] + jnp.uint32(group + 1)
    return (left >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _invert(mass: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """mass [B, V] (unnormalised probabilities), uniform [B] -> token int32 [B], total mass [B].

    Two levels: find the block that the threshold falls into, then the entry inside the block.
    """
    batch, vocab = mass.shape
    blocks = -(-vocab // _BLOCK)
    table = jnp.pad(mass, ((0, 0), (0, blocks * _BLOCK - vocab))).reshape(batch, blocks, _BLOCK)
    sums = jnp.sum(table, axis=-1)
    ends = _running_sum(sums)
    total = ends[:, -1]
    threshold = uniform * total
    rows = jnp.arange(batch)
    block = _first_beyond(ends, threshold, sums)
    inside = table[rows, block]
    within = threshold - (ends[rows, block] - sums[rows, block])
    return block * _BLOCK + _first_beyond(_running_sum(inside), within, inside), total


def _first_beyond(ends: jax.Array, threshold: jax.Array, mass: jax.Array) -> jax.Array:
    """ends, mass [B, N], threshold [B] -> int32 [B]: the first index with mass that ends beyond it.

    Where the rounding of the running sums leaves none, the last index with mass: an entry without
    mass is never taken.
    """
    size = mass.shape[-1]
    index = jnp.arange(size, dtype=jnp.int32)
    some = mass > 0
    first = jnp.min(jnp.where(some & (ends > threshold[:, None]), index, size), axis=-1)
    return jnp.minimum(first, jnp.max(jnp.where(some, index, 0), axis=-1))


def _running_sum(x: jax.Array) -> jax.Array:
    """x [B, N] -> inclusive sums along the last axis [B, N]."""
    size = x.shape[-1]
    if size > _SMALL:
        return jnp.cumsum(x, axis=-1)
    upper = jnp.triu(jnp.ones((size, size), x.dtype))
    return jnp.matmul(x, upper, precision=jax.lax.Precision.HIGHEST)


def _first(mask: jax.Array) -> jax.Array:
    """mask bool [B, N] -> int32 [B]: index of the first True, N - 1 if there is none."""
    size = mask.shape[-1]
    index = jnp.arange(size, dtype=jnp.int32)
    return jnp.min(jnp.where(mask, index, size - 1), axis=-1)
