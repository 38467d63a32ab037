"""The arrays that decoding passes around: what is known of each slot, and what a prefill leaves."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl.inference.sampling import Drawn, How
from jaxrl.models.decoder import KVCache

FIELDS = 4
"""Integers per generated token: token, valid, version, bits of the log-probability. After them come
N alternatives, and the bits of their N log-probabilities."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """What is known of each slot besides its cache. S slots, M stop tokens.

    drawn        of [S] rows: drawn, not yet given out
    version      int32 [S]  version of the weights that computed its logits
    position     int32 [S]  its index in the sequence, which is the number of cached entries
    remaining    int32 [S]  tokens that may still be given out, with this one; 0 = empty or finished
    how          of [S] rows
    stops        int32 [S, M]  padded with -1
    """

    drawn: Drawn
    version: jax.Array
    position: jax.Array
    remaining: jax.Array
    how: How
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
    length   int32 [N]   tokens of the prompt up to here
    version  int32 []    of the weights that computed the logits
    """

    logits: jax.Array
    length: jax.Array
    version: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """Prefilled pieces of prompts: a cache of N rows in a bucket of L entries, and what follows."""

    cache: KVCache
    first: First

    @property
    def nbytes(self) -> int:
        """Bytes on all devices together, each row counted once."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
    """Pieces of prompts, N rows of L tokens padded at the end.

    tokens           int32 [N, L]
    length, offset   int32 [N]  tokens of the piece, and of the prompt before it
    slot             int32 [N]  whose cache holds what is before it
    version          int32 []   of the weights
    """

    tokens: jax.Array
    length: jax.Array
    offset: jax.Array
    slot: jax.Array
    version: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """Which prefix row goes into which slot, from which entry on: int32 [S] each, of which `count`
    are used."""

    slot: jax.Array
    row: jax.Array
    offset: jax.Array
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spread:
    """One slot's cache for others: the first `blocks` blocks of `source` go into the first `count`
    of `targets` int32 [S]."""

    source: jax.Array
    targets: jax.Array
    count: jax.Array
    blocks: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Starts:
    """How to sample in freshly filled slots; fields as in `Slots`, with one entry per slot filled.

    slot, row  int32 [S]; slot of unused entries is S: out of range, so that nothing is written
    """

    slot: jax.Array
    row: jax.Array
    remaining: jax.Array
    how: How
    stops: jax.Array


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


def empty_slots(slots: int, max_stops: int, alternatives: int) -> Slots:
    """Every slot empty."""
    ints, floats = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.float32)
    return Slots(
        drawn=Drawn(
            token=ints,
            logp=floats,
            top_tokens=jnp.zeros((slots, alternatives), jnp.int32),
            top_logps=jnp.zeros((slots, alternatives), jnp.float32),
        ),
        version=ints,
        position=ints,
        remaining=ints,
        how=How(
            temperature=floats,
            top_k=ints,
            top_p=jnp.ones(slots, jnp.float32),
            seed=jnp.zeros((slots, 2), jnp.uint32),
            alternatives=ints,
        ),
        stops=jnp.full((slots, max_stops), -1, jnp.int32),
    )
