"""Continuous batching over an engine's slots: the synchronous core of the driver.

One thread calls this. It holds the decode state, the weights in use, and which request sits where.
The schedule follows from the order of the requests alone.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from jaxrl.inference.engine import Engine, Entry
from jaxrl.inference.requests import Request
from jaxrl.inference.steps import Params, Prefix

InFlight = Literal["finish", "continue", "recompute"]
IN_FLIGHT: tuple[InFlight, ...] = ("finish", "continue", "recompute")


@dataclasses.dataclass(slots=True)
class Counts:
    """What a batcher has done since it was made.

    `prefills` counts prompts that were computed, `prefix_hits` requests that used the prefill of an
    earlier request, `recomputed` sequences prefilled again because of new weights.
    """

    tokens: int = 0
    dispatches: int = 0
    prefills: int = 0
    prefix_hits: int = 0
    recomputed: int = 0


class Batcher:
    """Requests in slots. `in_flight` says what becomes of running requests when weights change."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        version: int,
        *,
        in_flight: InFlight,
        prefix_cache: int,
    ) -> None:
        self.engine = engine
        self.in_flight = in_flight
        self.counts = Counts()
        self.version = version
        self._weights: dict[int, Params] = {version: params}
        self._rows: list[Request | None] = [None] * engine.slots
        self._row_version = [version] * engine.slots
        self._prefixes = PrefixCache(prefix_cache)
        self._state = engine.init_state()

    @property
    def free_slots(self) -> list[int]:
        """Slots without a request, ascending."""
        return [slot for slot, request in enumerate(self._rows) if request is None]

    @property
    def running(self) -> list[Request]:
        """Requests in slots, in the order of the slots."""
        return [request for request in self._rows if request is not None]

    @property
    def live_versions(self) -> tuple[int, ...]:
        """Numbers of the weights that are held, ascending."""
        return tuple(sorted(self._weights))

    def drop(self, unwanted: Callable[[Request], bool]) -> None:
        """Frees the slots of unwanted requests; the next insert overwrites what they left."""
        for slot, request in enumerate(self._rows):
            if request is not None and unwanted(request):
                self._rows[slot] = None
        self._forget_old_weights()

    def swap(self, params: Params, version: int) -> None:
        """New requests use the new weights; running ones follow the in-flight policy."""
        self._weights[version] = params
        self.version = version
        # Keys and values of other weights must never serve a new request.
        self._prefixes.clear()
        if self.in_flight == "recompute":
            self._recompute()
        if self.in_flight != "finish":
            self._row_version = [version] * self.engine.slots
        self._forget_old_weights()

    def admit(self, requests: Sequence[Request]) -> None:
        """Puts requests (not more than free slots) into slots, in order."""
        found = self._prefill_missing(requests)
        placed: dict[int, tuple[Prefix, list[Entry]]] = {}
        for slot, request in zip(self.free_slots, requests, strict=False):
            self._rows[slot] = request
            self._row_version[slot] = self.version
            prefix, row = found[request.key]
            _, entries = placed.setdefault(id(prefix), (prefix, []))
            entries.append(Entry(slot, row, request.params))
        for prefix, entries in placed.values():
            self._state = self.engine.insert(prefix, self._state, entries)

    def step(self, waiting: Sequence[Request] = ()) -> list[Request]:
        """One dispatch for each version in use -> the requests that finished.

        `waiting` are the next requests in the queue; the dispatch ends early once enough slots are
        free to be worth an admission.
        """
        leave_at = self._worth_leaving(waiting)
        dispatches = [self._dispatch(version, leave_at) for version in self._versions_in_use()]
        # The one place where the host waits for the device: one transfer for k tokens a slot.
        results = [(slots, np.asarray(result)) for slots, result in dispatches]
        done = []
        for slots, values in results:
            for slot in slots:
                request = self._rows[slot]
                before = request.given
                request.take(values[slot])
                self.counts.tokens += request.given - before
                if request.finished:
                    done.append(request)
                    self._rows[slot] = None
        self._forget_old_weights()
        return done

    def _worth_leaving(self, waiting: Sequence[Request]) -> int | None:
        """How many slots shall be free before a dispatch ends early; None: it need not.

        A prefill of several prompts costs hardly more than one of a single prompt, so that slots
        wait for each other, unless the next request needs no prefill.
        """
        if not waiting:
            return None
        if self._prefixes.get(waiting[0].key) is not None:
            return 1
        return min(len(waiting), self.engine.prefill_rows[-1])

    def _versions_in_use(self) -> list[int]:
        rows = zip(self._rows, self._row_version, strict=True)
        return sorted({version for request, version in rows if request is not None})

    def _dispatch(self, version: int, leave_at: int | None) -> tuple[list[int], object]:
        rows = enumerate(zip(self._rows, self._row_version, strict=True))
        slots = [slot for slot, (request, v) in rows if request is not None and v == version]
        mask = np.zeros(self.engine.slots, bool)
        mask[slots] = True
        k = self.engine.steps_per_dispatch
        chosen = [self._rows[slot] for slot in slots]
        self._state, result = self.engine.generate(
            self._weights[version],
            self._state,
            version=version,
            mask=mask,
            longest=max(min(r.length + k, r.longest) for r in chosen),
            leave_at=leave_at,
        )
        self.counts.dispatches += 1
        return slots, result

    def _prefill_missing(self, requests: Sequence[Request]) -> dict[bytes, tuple[Prefix, int]]:
        """Prompt -> its prefix and row, prefilling each distinct prompt that is not cached."""
        found: dict[bytes, tuple[Prefix, int]] = {}
        missing: dict[bytes, Request] = {}
        for request in requests:
            cached = self._prefixes.get(request.key)
            if cached is not None:
                found[request.key] = cached
            else:
                missing.setdefault(request.key, request)
        self.counts.prefills += len(missing)
        self.counts.prefix_hits += len(requests) - len(missing)
        for batch in self._prefill_batches([r.prompt for r in missing.values()]):
            prompts = [prompt for _, prompt in batch]
            prefix = self.engine.prefill(self._weights[self.version], prompts, self.version)
            for row, prompt in enumerate(prompts):
                found[prompt.tobytes()] = (prefix, row)
                self._prefixes.put(prompt.tobytes(), (prefix, row))
        return found

    def _prefill_batches(
        self, sequences: Iterable[np.ndarray]
    ) -> list[list[tuple[int, np.ndarray]]]:
        """Indexed sequences in batches for one prefill call each: equal bucket, in order."""
        buckets: dict[int, list[tuple[int, np.ndarray]]] = {}
        for index, tokens in enumerate(sequences):
            size = self.engine.prefill_bucket(len(tokens))
            buckets.setdefault(size, []).append((index, tokens))
        most = self.engine.prefill_rows[-1]
        return [
            batch[start : start + most]
            for batch in buckets.values()
            for start in range(0, len(batch), most)
        ]

    def _recompute(self) -> None:
        """Fills the caches of running requests again, with the present weights."""
        slots = [slot for slot, request in enumerate(self._rows) if request is not None]
        sequences = [self._rows[slot].tokens() for slot in slots]
        for batch in self._prefill_batches(sequences):
            tokens = [sequence for _, sequence in batch]
            prefix = self.engine.prefill(self._weights[self.version], tokens, self.version)
            entries = [
                Entry(slots[index], row, self._rows[slots[index]].params)
                for row, (index, _) in enumerate(batch)
            ]
            self._state = self.engine.insert(prefix, self._state, entries, resume=True)
        self.counts.recomputed += len(slots)

    def _forget_old_weights(self) -> None:
        """Lets go of weights that no running request and no new one will use."""
        used = {self.version, *self._versions_in_use()}
        self._weights = {v: weights for v, weights in self._weights.items() if v in used}


class PrefixCache:
    """The last few prefilled prompts of the present weights: prompt -> (prefix, row)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: collections.OrderedDict[bytes, tuple[Prefix, int]] = (
            collections.OrderedDict()
        )

    def get(self, key: bytes) -> tuple[Prefix, int] | None:
        """The entry, which becomes the most recent one; None if there is none."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: bytes, entry: tuple[Prefix, int]) -> None:
        """Adds an entry; the least recently used one makes room."""
        self._entries[key] = entry
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
