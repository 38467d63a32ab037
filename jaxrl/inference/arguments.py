"""What the host passes to the engine's programs: records of requests made into numpy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.inference.sampling import How, seed_words
from jaxrl.inference.state import Copies, Pieces, Spread, Starts
from jaxrl.types import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt to compute: `tokens` int [L] follow the `offset` tokens of which slot
    `slot` already holds the cache. `offset` is a multiple of `Engine.prefill_chunk`."""

    tokens: np.ndarray
    slot: int = 0
    offset: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One slot to fill: row `row` of a prefix goes into `slot`, from cache entry `offset` on, and
    is sampled with `params`."""

    slot: int
    row: int
    params: SamplingParams
    offset: int = 0


def make_pieces(rows: int, bucket: int, version: int, pieces: Sequence[Piece]) -> Pieces:
    """Arrays of `rows` rows; those without a piece are one padded token."""
    arrays = Pieces(
        tokens=np.zeros((rows, bucket), np.int32),
        length=np.ones(rows, np.int32),
        offset=np.zeros(rows, np.int32),
        slot=np.zeros(rows, np.int32),
        version=np.int32(version),
    )
    for i, piece in enumerate(pieces):
        arrays.tokens[i, : len(piece.tokens)] = piece.tokens
        arrays.length[i], arrays.offset[i] = len(piece.tokens), piece.offset
        arrays.slot[i] = piece.slot
    return arrays


def make_copies(slots: int, entries: Sequence[Entry]) -> Copies:
    """Where the caches of entries go."""
    slot, row, offset = (np.zeros(slots, np.int32) for _ in range(3))
    for i, entry in enumerate(entries):
        slot[i], row[i], offset[i] = entry.slot, entry.row, entry.offset
    return Copies(slot, row, offset, np.int32(len(entries)))


def make_starts(slots: int, max_stops: int, entries: Sequence[Entry]) -> Starts:
    """How entries are sampled."""
    how = How(
        temperature=np.zeros(slots, np.float32),
        top_k=np.zeros(slots, np.int32),
        top_p=np.ones(slots, np.float32),
        seed=np.zeros((slots, 2), np.uint32),
        alternatives=np.zeros(slots, np.int32),
    )
    starts = Starts(
        slot=np.full(slots, slots, np.int32),
        row=np.zeros(slots, np.int32),
        remaining=np.zeros(slots, np.int32),
        how=how,
        stops=np.full((slots, max_stops), -1, np.int32),
    )
    for i, entry in enumerate(entries):
        params = entry.params
        starts.slot[i], starts.row[i] = entry.slot, entry.row
        starts.remaining[i] = params.max_tokens
        starts.stops[i, : len(params.stop_tokens)] = params.stop_tokens
        how.temperature[i], how.seed[i] = params.temperature, seed_words(params.seed)
        how.top_k[i], how.top_p[i] = params.top_k, params.top_p
        how.alternatives[i] = params.top_logprobs
    return starts


def make_spread(slots: int, source: int, targets: Sequence[int], blocks: int) -> Spread:
    """Which slots get the first `blocks` blocks of another's cache."""
    padded = np.zeros(slots, np.int32)
    padded[: len(targets)] = targets
    return Spread(np.int32(source), padded, np.int32(len(targets)), np.int32(blocks))
