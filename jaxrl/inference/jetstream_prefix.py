"""Prefixes that need no slot: what JetStream's prefill gives and its insert takes, and the programs
that make them and use them. Pure functions of arrays; nothing here imports JetStream."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.inference import steps
from jaxrl.inference.sampling import Drawn, How, draw
from jaxrl.inference.state import Copies, DecodeState, First, Slots, Starts
from jaxrl.models.decoder import KVCache

TOKEN, VALID, LENGTH, VERSION, LOGP, STREAM = range(6)
"""Columns of a result. The first three are JetStream's; VERSION is the number of the weights whose
logits gave the token (-1: none did), LOGP the bits of its log-probability, STREAM tells requests
apart."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Computed:
    """Keys and values of one prompt, one row of L entries, and the number of the weights that they
    come from: int32 [], on the host until somebody moves it."""

    kv: KVCache
    version: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """One computed prompt, independent of every slot and state. S slots.

    cache    the prompt's keys and values
    tokens   int32 [P]     the prompt; on the host until somebody moves it, as the next three are
    seeds    uint32 [S, 2] of the samples
    samples  int32 []      rows of `drawn` that were drawn
    stream   int32 []      a number of the first sample; the next ones follow
    drawn    of [S] rows   the first token of each sample
    """

    cache: Computed
    tokens: Any
    seeds: Any
    samples: Any
    stream: Any
    drawn: Drawn

    def __getitem__(self, name: str) -> Any:
        """Chunked prefill takes the cache out of a prefix by its name."""
        return getattr(self, name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What decoding changes. `lengths` int32 [S] are tokens given out (-1: never filled), `streams`
    int32 [S] tell requests apart; `held` int32 [S], on the host, bounds the tokens of each sequence
    (0: never filled)."""

    decode: DecodeState
    lengths: jax.Array
    streams: jax.Array
    held: np.ndarray


def draw_first(
    first: First, how: How, stream: jax.Array, *, slots: int
) -> tuple[Drawn, jax.Array, jax.Array]:
    """The first tokens of N samples, from the one row of `first` -> (drawn, padded to `slots` rows;
    result int32 [N, 6]; log-probabilities float32 [N, 1])."""
    samples = how.temperature.shape[0]
    logits = jnp.broadcast_to(first.logits[:1], (samples, first.logits.shape[-1]))
    position = jnp.broadcast_to(first.length[0], (samples,))
    drawn = draw(logits, how, position)
    ones = jnp.ones(samples, jnp.int32)
    streams = stream + jnp.arange(samples, dtype=jnp.int32)
    result = _columns(drawn, ones, ones, first.version, streams)
    padding = slots - samples
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))), drawn)
    return padded, result, drawn.logp[:, None]


def take_row(cache: KVCache, *, length: int) -> KVCache:
    """The first `length` entries of the first row of every leaf [..., B, K, S, H]."""

    def leaf(x: jax.Array) -> jax.Array:
        row = lax.slice_in_dim(x, 0, 1, axis=x.ndim - 4)
        return lax.slice_in_dim(row, 0, length, axis=x.ndim - 2)

    return jax.tree.map(leaf, cache)


def put_row(kv: KVCache, cache: KVCache) -> KVCache:
    """One row, as `take_row` gives it, into the first row of `cache`."""
    zeros = jnp.zeros(1, jnp.int32)
    return steps.copy_rows(kv, cache, Copies(zeros, zeros, zeros, jnp.int32(1)))


def fill(
    prefix: tuple[KVCache, Drawn, jax.Array, jax.Array, jax.Array],
    decode: DecodeState,
    lengths: jax.Array,
    streams: jax.Array,
    copies: Copies,
    starts: Starts,
    *,
    given: int,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Puts one prefix (keys and values, drawn, version, length of the prompt, stream) into slots.

    Nothing of what was in a slot before remains in use. `given` tokens have been given out already.
    """
    kv, drawn, version, length, stream = prefix
    cache = steps.copy_rows(kv, decode.cache, copies)
    fresh = Slots(
        drawn=jax.tree.map(lambda x: x[starts.row], drawn),
        version=jnp.broadcast_to(version, starts.row.shape),
        position=jnp.broadcast_to(length, starts.row.shape),
        remaining=starts.remaining,
        how=starts.how,
        stops=starts.stops,
    )

    def put(old: jax.Array, new: jax.Array | int) -> jax.Array:
        return old.at[starts.slot].set(new, mode="drop")

    slots = jax.tree.map(put, decode.slots, fresh)
    numbers = stream + jnp.arange(starts.row.shape[0], dtype=jnp.int32)
    return DecodeState(cache, slots), put(lengths, given), put(streams, numbers)


def report(
    raw: jax.Array,
    slots: Slots,
    lengths: jax.Array,
    streams: jax.Array,
    *,
    ahead: bool,
    end: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step's result -> (result int32 [S, 6], log-probabilities float32 [S, 1], new lengths).

    raw int32 [S, 1, F] is what the engine gave out. With `ahead`, the token that was drawn after it
    is told instead. A row that has come to its end tells the token `end` for ever.
    """
    if ahead:
        drawn, version, alive = slots.drawn, slots.version, slots.remaining > 0
    else:
        token, valid, version, bits = (raw[:, 0, i] for i in range(4))
        logp = lax.bitcast_convert_type(bits, jnp.float32)
        drawn, alive = slots.drawn._replace(token=token, logp=logp), valid > 0
    filled = lengths >= 0
    lengths = jnp.where(filled, lengths + 1, lengths)
    told = drawn._replace(
        token=jnp.where(alive, drawn.token, end), logp=jnp.where(alive, drawn.logp, 0.0)
    )
    version = jnp.where(alive, version, -1)
    result = _columns(told, filled.astype(jnp.int32), lengths, version, streams)
    return result, told.logp[:, None], lengths


def _columns(
    drawn: Drawn, valid: jax.Array, lengths: jax.Array, version: jax.Array, streams: jax.Array
) -> jax.Array:
    version = jnp.broadcast_to(version, valid.shape)
    bits = lax.bitcast_convert_type(drawn.logp, jnp.int32)
    return jnp.stack([drawn.token, valid, lengths, version, bits, streams], axis=-1)
