"""The two halves behind JetStream's verbs: one computes prompts without a slot, the other decodes.

Every program is compiled once for its shapes, by `warm_up` if that runs, and refuses others.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.inference import jetstream_prefix as programs
from jaxrl.inference.arguments import Entry, Piece, make_copies, make_starts
from jaxrl.inference.engine import Engine
from jaxrl.inference.jetstream_prefix import Computed, Prefix, State
from jaxrl.inference.jetstream_programs import (
    Place,
    Programs,
    prefix_lengths,
    row_like,
    shardings_of,
)
from jaxrl.inference.sampling import Drawn, How
from jaxrl.inference.state import FIELDS, DecodeState, First
from jaxrl.inference.steps import Params
from jaxrl.models.decoder import KVCache
from jaxrl.types import SamplingParams


def make_how(params: SamplingParams, seeds: np.ndarray) -> How:
    """How to sample one row for each of `seeds` uint32 [N, 2]."""
    n = len(seeds)
    return How(
        temperature=np.full(n, params.temperature, np.float32),
        top_k=np.full(n, params.top_k, np.int32),
        top_p=np.full(n, params.top_p, np.float32),
        seed=seeds,
        alternatives=np.zeros(n, np.int32),
    )


class PrefillHalf:
    """Computes prompts in a state of its own, so that nobody needs a slot.

    `engine` has one slot (or one for each group of devices). `samples` is the most first tokens
    that are drawn for one prompt, and the number of rows of every prefix.
    """

    def __init__(
        self, engine: Engine, sampling: SamplingParams, samples: int, place: Place
    ) -> None:
        self.engine = engine
        self.programs = Programs()
        self.lengths = prefix_lengths(engine)
        self._sampling = sampling
        self._samples = samples
        self._place = place
        # The prompts of several threads are computed one after the other.
        self._lock = threading.Lock()
        self._scratch: Any = None

    def warm_up(self, params: Params) -> None:
        """Compiles every program."""
        with self._lock:
            self._compute_one_of_each(params)
            for length in self.lengths:
                if length > self.engine.prefill_chunk:
                    self._take_row(length)
                if length >= self.engine.prefill_chunk:
                    self._put_row(length)
            for samples in {1, self._samples}:
                self._draw(samples)

    def compute(
        self, params: Params, version: int, tokens: np.ndarray, cached: Computed | None, known: int
    ) -> tuple[KVCache, First]:
        """tokens int32 [P], of which `cached` holds the first `known` < P -> keys and values, and
        what the first token is drawn from. Keys and values of other weights are not used."""
        chunk = self.engine.prefill_chunk
        usable = cached is not None and int(cached.version) == version
        done = known - known % chunk if usable else 0
        with self._lock:
            if len(tokens) <= chunk:
                piece = self.engine.prefill(params, [Piece(tokens)], version, self._state())
                return piece.cache, piece.first
            if done:
                kv = cached.kv
                length = jax.tree.leaves(kv)[0].shape[-2]
                state = self._state()
                # Given away: nobody else holds this state.
                cache = self._put_row(length)(kv, state.cache)
                self._scratch = DecodeState(cache, state.slots)
            piece = None
            for start in range(done, len(tokens), chunk):
                part = Piece(tokens[start : start + chunk], 0, start)
                piece = self.engine.prefill(params, [part], version, self._state())
                entry = Entry(0, 0, self._sampling, start)
                self._scratch = self.engine.insert(piece, self._state(), [entry], resume=True)
            length = next(size for size in self.lengths if size >= len(tokens))
            return self._take_row(length)(self._state().cache), piece.first

    def draw(
        self, first: First, seeds: np.ndarray, samples: int, stream: int
    ) -> tuple[Drawn, jax.Array, jax.Array]:
        """The first tokens of `samples` samples; see `draw_first`. seeds uint32 [S, 2]."""
        rows = 1 if samples == 1 else self._samples
        how = make_how(self._sampling, seeds[:rows])
        drawn, result, logps = self._draw(rows)(first, how, np.int32(stream))
        return drawn, result[:samples], logps[:samples]

    def _compute_one_of_each(self, params: Params) -> None:
        # `Engine.warm_up` would also compile what decodes, which takes longer than all the rest.
        state, buckets = self._state(), self.engine.prefill_buckets

        def prefill(bucket: int) -> Any:
            return self.engine.prefill(params, [Piece(np.zeros(bucket, np.int32))], 0, state)

        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            pieces = list(pool.map(prefill, buckets))
        for piece in pieces:
            entry = Entry(0, 0, self._sampling)
            self._scratch = self.engine.insert(piece, self._state(), [entry], resume=True)

    def _state(self) -> Any:
        if self._scratch is None:
            self._scratch = self.engine.init_state()
        return self._scratch

    def _take_row(self, length: int) -> Callable:
        function = functools.partial(programs.take_row, length=length)
        out = shardings_of(row_like(self.engine, length, self._place))
        return self.programs.get(("take", length), function, self._state().cache, out=out)

    def _put_row(self, length: int) -> Callable:
        cache = self._state().cache
        row = row_like(self.engine, length, self._place)
        return self.programs.get(
            ("put", length), programs.put_row, row, cache, donate=(1,), out=shardings_of(cache)
        )

    def _draw(self, samples: int) -> Callable:
        vocab = self.engine.model.config.vocab_size
        ints = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=self._place.whole)
        first = First(
            logits=jax.ShapeDtypeStruct((1, vocab), jnp.float32, sharding=self._place.whole),
            length=ints,
            version=jax.ShapeDtypeStruct((), jnp.int32, sharding=self._place.whole),
        )
        how = make_how(self._sampling, np.zeros((samples, 2), np.uint32))
        function = functools.partial(programs.draw_first, slots=self._samples)
        return self.programs.get(
            ("draw", samples), function, first, how, np.int32(0), out=self._place.whole
        )


class DecodeHalf:
    """Decodes all slots of `engine`, one token a step.

    `ahead`: a step tells the token that it has drawn, not the one drawn before. Rows that have
    ended tell `end`.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        place: Place,
        *,
        ahead: bool,
        end: int,
    ) -> None:
        self.engine = engine
        self.programs = Programs()
        self.ahead = ahead
        self._sampling = sampling
        self._end = end
        self._place = place
        self._fresh: State | None = None

    def warm_up(self) -> None:
        """Compiles every program."""
        self.engine.warm_up(prefill_buckets=())
        # Kept for the first caller: two whole states might not fit.
        self._fresh = self._empty() if self._fresh is None else self._fresh
        for length in prefix_lengths(self.engine):
            self._fill(length, self._fresh)
        self._report(self._fresh)

    def init_state(self) -> State:
        """Every slot empty."""
        state, self._fresh = self._fresh, None
        return self._empty() if state is None else state

    def place(self, prefix: Prefix, state: State, slots: Sequence[int]) -> State:
        """Puts sample i of `prefix` into `slots[i]` (the last sample into what is left over); the
        arrays of `state` are given away, those of `prefix` are not."""
        room = self.engine.max_length - len(prefix.tokens)
        seeds, samples = np.asarray(prefix.seeds), int(prefix.samples)
        if len(seeds) != self.engine.slots:
            raise ValueError(
                f"the prefix comes from an engine of {len(seeds)} slots and cannot go into one of "
                f"{self.engine.slots}: both must have the same number"
            )
        how = dataclasses.replace(self._sampling, max_tokens=room)
        copies, starts = self._arguments(
            [Entry(slot, min(i, samples - 1), how) for i, slot in enumerate(slots)]
        )
        starts.how.seed[: len(slots)] = seeds[: len(slots)]
        length = jax.tree.leaves(prefix.cache.kv)[0].shape[-2]
        source = (
            prefix.cache.kv,
            prefix.drawn,
            np.int32(prefix.cache.version),
            np.int32(len(prefix.tokens)),
            np.int32(prefix.stream),
        )
        arrays = (state.decode, state.lengths, state.streams)
        filled = self._fill(length, state)(source, *arrays, copies, starts)
        held = state.held.copy()
        held[list(slots)] = len(prefix.tokens)
        return State(*filled, held)

    def step(
        self, params: Params, version: int, state: State, freed: np.ndarray
    ) -> tuple[State, jax.Array, jax.Array]:
        """One token for every filled slot but those of `freed` bool [S] -> the state, the result
        int32 [S, 6] and log-probabilities float32 [S, 1]; nothing waits for the device."""
        active = (state.held > 0) & ~freed
        held = np.where(active, np.minimum(state.held + 1, self.engine.max_length), state.held)
        decode, raw = self.engine.generate(
            params,
            state.decode,
            version=version,
            mask=active,
            longest=int(np.max(held, where=active, initial=1)),
            max_steps=1,
        )
        program = self._report(state)
        result, logps, lengths = program(raw, decode.slots, state.lengths, state.streams)
        return State(decode, lengths, state.streams, held), result, logps

    def _arguments(self, entries: list[Entry]) -> tuple:
        # All slots get the keys and values of the one row, but each its own sample.
        copied = [dataclasses.replace(entry, row=0) for entry in entries]
        starts = make_starts(self.engine.slots, self.engine.max_stop_tokens, entries)
        return make_copies(self.engine.slots, copied), starts

    def _empty(self) -> State:
        slots = self.engine.slots
        lengths = jax.device_put(np.full(slots, -1, np.int32), self._place.whole)
        streams = jax.device_put(np.zeros(slots, np.int32), self._place.whole)
        return State(self.engine.init_state(), lengths, streams, np.zeros(slots, np.int32))

    def _fill(self, length: int, state: State) -> Callable:
        kv = row_like(self.engine, length, self._place)
        one = np.int32(0)
        source = (kv, self._drawn_like(), one, one, one)
        arrays = (state.decode, state.lengths, state.streams)
        function = functools.partial(programs.fill, given=int(self.ahead))
        return self.programs.get(
            ("fill", length),
            function,
            source,
            *arrays,
            *self._arguments([]),
            donate=(1,),
            out=shardings_of(arrays),
        )

    def _report(self, state: State) -> Callable:
        function = functools.partial(programs.report, ahead=self.ahead, end=self._end)
        # What `generate` gives: token, valid, version and bits, one step of each.
        shape = (self.engine.slots, 1, FIELDS)
        raw = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._place.whole)
        arrays = (state.decode.slots, state.lengths, state.streams)
        return self.programs.get(("report",), function, raw, *arrays, out=self._place.whole)

    def _drawn_like(self) -> Drawn:
        def like(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place.whole)

        slots = self.engine.slots
        floats = functools.partial(like, dtype=jnp.float32)
        return Drawn(like(slots), floats(slots), like(slots, 0), floats(slots, 0))
