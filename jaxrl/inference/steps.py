"""The decode engine's verbs as pure functions of arrays: prefill, insert, generate.

A slot is a row of the decode state. Its `token` is drawn but not yet given out; a step gives it
out, feeds it to the model and draws the next one. So the first token of a request comes from the
logits of its prefill, and every token carries the version of the weights that computed its logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxrl.inference.sampling import sample_tokens
from jaxrl.models.decoder import KVCache
from jaxrl.models.model import Model, forward, init_cache, unembed
from jaxrl.sharding import Rules

Params = Any
NextLogits = Callable[[jax.Array, jax.Array, KVCache, jax.Array], tuple[jax.Array, KVCache]]

FIELDS = 4
"""Integers per generated token: token, valid, version, bits of the log-probability."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """What is known of each slot besides its cache. S slots, M stop tokens.

    token        int32 [S]  drawn, not yet given out
    logp         float32 [S] its log-probability
    version      int32 [S]  version of the weights that computed its logits
    position     int32 [S]  its index in the sequence, which is the number of cached entries
    remaining    int32 [S]  tokens that may still be given out, with this one; 0 = empty or finished
    temperature  float32 [S]
    seed         uint32 [S, 2]
    stops        int32 [S, M]  padded with -1
    """

    token: jax.Array
    logp: jax.Array
    version: jax.Array
    position: jax.Array
    remaining: jax.Array
    temperature: jax.Array
    seed: jax.Array
    stops: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that decoding changes; donated from call to call."""

    cache: KVCache
    slots: Slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class First:
    """What the first token after each prefilled prompt is drawn from.

    logits   float32 [N, V]
    length   int32 [N]   true prompt lengths
    version  int32 []    of the weights that computed the logits
    """

    logits: jax.Array
    length: jax.Array
    version: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Prefilled prompts: a cache of N rows in a bucket of L entries, and what follows."""

    cache: KVCache
    first: First


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """Which prefix row goes into which slot: int32 [S] each, of which `count` are used."""

    slot: jax.Array
    row: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Starts:
    """How to sample in freshly filled slots; fields as in `Slots`, with one entry per copy.

    slot, row  int32 [S]; slot of unused entries is S: out of range, so that nothing is written
    """

    slot: jax.Array
    row: jax.Array
    remaining: jax.Array
    temperature: jax.Array
    seed: jax.Array
    stops: jax.Array


def empty_slots(slots: int, max_stops: int) -> Slots:
    """Every slot empty."""
    zeros = jnp.zeros(slots, jnp.int32)
    return Slots(
        token=zeros,
        logp=jnp.zeros(slots, jnp.float32),
        version=zeros,
        position=zeros,
        remaining=zeros,
        temperature=jnp.zeros(slots, jnp.float32),
        seed=jnp.zeros((slots, 2), jnp.uint32),
        stops=jnp.full((slots, max_stops), -1, jnp.int32),
    )


def prefill(
    model: Model,
    params: Params,
    tokens: jax.Array,
    length: jax.Array,
    version: jax.Array,
    *,
    out_rows: int,
    mesh: Mesh | None,
    rules: Rules,
) -> Prefix:
    """tokens int32 [N, L] (padded at the end), length int32 [N] -> Prefix.

    What the first tokens are drawn from is padded to `out_rows` rows: one shape for all prefills.

    Cache entries past a row's length hold garbage; they are overwritten before any query sees them.
    """
    rows, bucket = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(bucket, dtype=jnp.int32), (rows, bucket))
    cache = init_cache(model, rows, bucket)
    hidden, cache = forward(model, params, tokens, positions, None, cache, mesh=mesh, rules=rules)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
    logits = jnp.pad(unembed(model, params, last), ((0, out_rows - rows), (0, 0)))
    return Prefix(cache, First(logits, jnp.pad(length, (0, out_rows - rows)), version))


def copy_rows(source: KVCache, target: KVCache, copies: Copies) -> KVCache:
    """Copies cache rows into slots; one row may go into many. Leaves are [..., B, K, S, H]."""

    def copy(i: jax.Array, cache: KVCache) -> KVCache:
        def leaf(old: jax.Array, new: jax.Array) -> jax.Array:
            piece = lax.dynamic_slice_in_dim(new, copies.row[i], 1, axis=new.ndim - 4)
            start = [0] * old.ndim
            start[old.ndim - 4] = copies.slot[i]
            return lax.dynamic_update_slice(old, piece.astype(old.dtype), start)

        return jax.tree.map(leaf, cache, source)

    return lax.fori_loop(0, copies.count, copy, target)


def start_slots(first: First, slots: Slots, starts: Starts) -> Slots:
    """Draws the first token of each freshly filled slot from the logits of its prefill."""
    position = first.length[starts.row]
    token, logp = sample_tokens(first.logits[starts.row], starts.temperature, starts.seed, position)
    fresh = Slots(
        token=token,
        logp=logp,
        version=jnp.broadcast_to(first.version, token.shape),
        position=position,
        remaining=starts.remaining,
        temperature=starts.temperature,
        seed=starts.seed,
        stops=starts.stops,
    )
    return jax.tree.map(lambda old, new: old.at[starts.slot].set(new, mode="drop"), slots, fresh)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Control:
    """What the host decides about one dispatch.

    mask      bool [S]   slots that take part; the others are frozen
    version   int32 []   number of the weights passed with it
    steps     int32 []   at most so many steps, up to the compiled number
    leave_at  int32 []   end early once so many rows have finished in this dispatch
    """

    mask: jax.Array
    version: jax.Array
    steps: jax.Array
    leave_at: jax.Array


def generate(
    next_logits: NextLogits,
    state: DecodeState,
    control: Control,
    *,
    steps: int,
    attend_length: int,
) -> tuple[DecodeState, jax.Array]:
    """Up to `steps` tokens for every slot -> state, int32 [S, steps, 4].

    The last axis is token, valid, version, bits of the log-probability. `next_logits` gives the
    logits after each row's present token; queries see the first `attend_length` cache entries,
    which must cover every row that takes part.
    """
    out = jnp.zeros((steps, *state.slots.token.shape, FIELDS), jnp.int32)
    running = control.mask & (state.slots.remaining > 0)
    limit = jnp.minimum(control.steps, steps)

    def more(carry: tuple) -> jax.Array:
        i, now, _ = carry
        active = control.mask & (now.slots.remaining > 0)
        finished = jnp.sum(running & ~active)
        return (i < limit) & jnp.any(active) & (finished < control.leave_at)

    def step(carry: tuple) -> tuple:
        i, now, out = carry
        given, alive, slots = _give_out(now.slots, control.mask)
        out = lax.dynamic_update_index_in_dim(out, given, i, axis=0)
        logits, cache = next_logits(slots.token, slots.position, now.cache, alive)
        slots = _advance(slots, alive, logits, control.version)
        return i + 1, DecodeState(cache, slots), out

    # Cut out what is attended to once per dispatch: cutting in each step would copy it each time.
    short = DecodeState(_cut(state.cache, attend_length), state.slots)
    _, short, out = lax.while_loop(more, step, (jnp.int32(0), short, out))
    cache = jax.tree.map(_put_back, state.cache, short.cache)
    return DecodeState(cache, short.slots), jnp.swapaxes(out, 0, 1)


def next_logits(model: Model, params: Params, mesh: Mesh | None, rules: Rules) -> NextLogits:
    """The model's decode step: (token [S], position [S], cache, alive bool [S]) -> (logits, cache).

    Writes each live row's token into the cache at its position and attends to what is before.
    """

    def step(
        token: jax.Array, position: jax.Array, cache: KVCache, alive: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        hidden, cache = forward(
            model,
            params,
            token[:, None],
            position[:, None],
            None,
            cache,
            write_mask=alive,
            mesh=mesh,
            rules=rules,
        )
        return unembed(model, params, hidden[:, 0]), cache

    return step


def _cut(cache: KVCache, length: int) -> KVCache:
    """The first `length` entries of every row; leaves are [..., B, K, S, H]."""
    return jax.tree.map(lambda x: lax.slice_in_dim(x, 0, length, axis=x.ndim - 2), cache)


def _put_back(whole: jax.Array, part: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, part, 0, axis=whole.ndim - 2)


def _give_out(slots: Slots, mask: jax.Array) -> tuple[jax.Array, jax.Array, Slots]:
    """-> the result int32 [S, 4], rows that go on after this token bool [S], the slots."""
    active = mask & (slots.remaining > 0)
    bits = lax.bitcast_convert_type(slots.logp, jnp.int32)
    fields = [slots.token, active.astype(jnp.int32), slots.version, bits]
    given = jnp.where(active[:, None], jnp.stack(fields, axis=-1), 0)
    stopped = jnp.any(slots.stops == slots.token[:, None], axis=-1)
    left = jnp.where(stopped, 0, slots.remaining - 1)
    slots = dataclasses.replace(slots, remaining=jnp.where(active, left, slots.remaining))
    return given, mask & (slots.remaining > 0), slots


def _advance(slots: Slots, alive: jax.Array, logits: jax.Array, version: jax.Array) -> Slots:
    """Draws the next token of the rows that go on; the others keep what they have."""
    position = slots.position + 1
    token, logp = sample_tokens(logits, slots.temperature, slots.seed, position)
    return dataclasses.replace(
        slots,
        token=jnp.where(alive, token, slots.token),
        logp=jnp.where(alive, logp, slots.logp),
        version=jnp.where(alive, version, slots.version),
        position=jnp.where(alive, position, slots.position),
    )
