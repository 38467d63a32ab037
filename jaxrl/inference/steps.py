"""The decode engine's verbs as pure functions of arrays: prefill, insert, generate.

A slot is a row of the decode state. Its token is drawn but not yet given out; a step gives it
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

from jaxrl.inference.sampling import draw
from jaxrl.inference.state import (
    FIELDS,
    Control,
    Copies,
    DecodeState,
    First,
    Pieces,
    Prefix,
    Slots,
    Spread,
    Starts,
)
from jaxrl.models.chunked import Prior, pick_row
from jaxrl.models.decoder import KVCache
from jaxrl.models.model import Model, forward, unembed
from jaxrl.sharding import Rules

Params = Any
NextLogits = Callable[[jax.Array, jax.Array, KVCache, jax.Array], tuple[jax.Array, KVCache]]


def prefill(
    model: Model,
    params: Params,
    cache: KVCache,
    pieces: Pieces,
    *,
    block: int,
    out_rows: int,
    mesh: Mesh | None,
    rules: Rules,
) -> Prefix:
    """Pieces [N, L] of prompts whose beginnings stand in `cache` -> their own Prefix.

    Beginnings are whole blocks of `block` tokens. What the first tokens are drawn from is padded to
    `out_rows` rows: one shape for all prefills. Entries past a piece's length hold garbage; they
    are overwritten before any query sees them.
    """
    rows, bucket = pieces.tokens.shape
    positions = pieces.offset[:, None] + jnp.arange(bucket, dtype=jnp.int32)
    prior = Prior(pieces.slot, pieces.offset, block, split=rules.shards(mesh, "slots") > 1)
    hidden, own = forward(
        model, params, pieces.tokens, positions, None, cache, prior=prior, mesh=mesh, rules=rules
    )
    last = jnp.take_along_axis(hidden, (pieces.length - 1)[:, None, None], axis=1)[:, 0]
    logits = jnp.pad(unembed(model, params, last), ((0, out_rows - rows), (0, 0)))
    length = jnp.pad(pieces.offset + pieces.length, (0, out_rows - rows))
    return Prefix(own, First(logits, length, pieces.version))


def copy_rows(source: KVCache, target: KVCache, copies: Copies) -> KVCache:
    """Copies cache rows into slots; one row may go into many. Leaves are [..., B, K, S, H]."""

    def copy(i: jax.Array, cache: KVCache) -> KVCache:
        def leaf(old: jax.Array, new: jax.Array) -> jax.Array:
            piece = lax.dynamic_slice_in_dim(new, copies.row[i], 1, axis=new.ndim - 4)
            return _write(old, piece.astype(old.dtype), copies.slot[i], copies.offset[i])

        return jax.tree.map(leaf, cache, source)

    return lax.fori_loop(0, copies.count, copy, target)


def spread_row(cache: KVCache, spread: Spread, *, block: int, split: bool) -> KVCache:
    """Copies the beginning of one slot's cache into others', block by block.

    `split`: slots lie on different devices.
    """
    copy = _copy_split_block if split else _copy_block

    def one_block(i: jax.Array, cache: KVCache) -> KVCache:
        return jax.tree.map(lambda leaf: copy(leaf, spread, i * block, block), cache)

    return lax.fori_loop(0, spread.blocks, one_block, cache)


def _copy_block(leaf: jax.Array, spread: Spread, start: jax.Array, block: int) -> jax.Array:
    """One block of leaf [..., B, K, S, H] from the source into the targets, one by one."""
    shape, begin = list(leaf.shape), [0] * leaf.ndim
    shape[-4], shape[-2] = 1, block
    begin[-4], begin[-2] = spread.source, start
    # Without the barrier, reading and writing become one kernel, which copies the whole cache.
    piece = lax.optimization_barrier(lax.dynamic_slice(leaf, begin, shape))

    def one_target(j: jax.Array, leaf: jax.Array) -> jax.Array:
        return _write(leaf, piece, spread.targets[j], start)

    return lax.fori_loop(0, spread.count, one_target, leaf)


def _copy_split_block(leaf: jax.Array, spread: Spread, start: jax.Array, block: int) -> jax.Array:
    """`_copy_block` where slots lie on different devices: each writes a block of all its slots, and
    the source's block is the only thing that travels."""
    slots, entries = leaf.ndim - 4, leaf.ndim - 2
    part = lax.dynamic_slice_in_dim(leaf, start, block, axis=entries)
    row = jnp.expand_dims(pick_row(jnp.moveaxis(part, slots, 0), spread.source), slots)
    index = jnp.arange(leaf.shape[slots])
    wanted = jnp.arange(len(spread.targets)) < spread.count
    target = jnp.any((index[:, None] == spread.targets) & wanted, axis=1)
    part = jnp.where(target[:, None, None, None], row, part)
    return lax.dynamic_update_slice_in_dim(leaf, part, start, axis=entries)


def _write(leaf: jax.Array, piece: jax.Array, slot: jax.Array, entry: jax.Array) -> jax.Array:
    """leaf [..., B, K, S, H] with piece [..., 1, K, L, H] in a slot, from an entry on."""
    start = [0] * leaf.ndim
    start[-4], start[-2] = slot, entry
    return lax.dynamic_update_slice(leaf, piece, start)


def start_slots(first: First, slots: Slots, starts: Starts) -> Slots:
    """Draws the first token of each freshly filled slot from the logits of its prefill."""
    position = first.length[starts.row]
    alternatives = slots.drawn.top_tokens.shape[-1]
    drawn = draw(first.logits[starts.row], starts.how, position, alternatives=alternatives)
    fresh = Slots(
        drawn=drawn,
        version=jnp.broadcast_to(first.version, position.shape),
        position=position,
        remaining=starts.remaining,
        how=starts.how,
        stops=starts.stops,
    )
    return jax.tree.map(lambda old, new: old.at[starts.slot].set(new, mode="drop"), slots, fresh)


def generate(
    next_logits: NextLogits,
    state: DecodeState,
    control: Control,
    *,
    steps: int,
    attend_length: int,
) -> tuple[DecodeState, jax.Array]:
    """Up to `steps` tokens for every slot -> state, int32 [S, steps, FIELDS + 2 N].

    The last axis is token, valid, version, bits of the log-probability, N alternatives and the bits
    of their log-probabilities. `next_logits` gives the
    logits after each row's present token; queries see the first `attend_length` cache entries,
    which must cover every row that takes part.
    """
    shape = state.slots.drawn.top_tokens.shape
    out = jnp.zeros((steps, shape[0], FIELDS + 2 * shape[1]), jnp.int32)
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
        logits, cache = next_logits(slots.drawn.token, slots.position, now.cache, alive)
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
    """-> the result int32 [S, FIELDS + 2 N], bool [S] which rows go on after it, the slots."""
    active = mask & (slots.remaining > 0)
    given = next_rows(slots, active)
    stopped = jnp.any(slots.stops == slots.drawn.token[:, None], axis=-1)
    left = jnp.where(stopped, 0, slots.remaining - 1)
    slots = dataclasses.replace(slots, remaining=jnp.where(active, left, slots.remaining))
    return given, mask & (slots.remaining > 0), slots


def next_rows(slots: Slots, active: jax.Array) -> jax.Array:
    """What `active` bool [S] slots give out next -> int32 [S, FIELDS + 2 N]; 0 for the others."""
    drawn = slots.drawn
    fields = [drawn.token, active.astype(jnp.int32), slots.version, _bits(drawn.logp)]
    parts = [jnp.stack(fields, axis=-1), drawn.top_tokens, _bits(drawn.top_logps)]
    return jnp.where(active[:, None], jnp.concatenate(parts, axis=-1), 0)


def _advance(slots: Slots, alive: jax.Array, logits: jax.Array, version: jax.Array) -> Slots:
    """Draws the next token of the rows that go on; the others keep what they have."""
    position = slots.position + 1
    drawn = draw(logits, slots.how, position, alternatives=slots.drawn.top_tokens.shape[-1])

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(alive.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return dataclasses.replace(
        slots,
        drawn=jax.tree.map(keep, drawn, slots.drawn),
        version=jnp.where(alive, version, slots.version),
        position=jnp.where(alive, position, slots.position),
    )


def _bits(x: jax.Array) -> jax.Array:
    """float32 as the int32 of the same bits."""
    return lax.bitcast_convert_type(x, jnp.int32)
