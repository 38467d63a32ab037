"""Continuous batching over an engine's slots: the synchronous core of the driver.

One thread calls this. It holds the decode state, the weights in use, and which request sits where.
The schedule follows from the order of the requests alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from jaxrl.inference.arguments import Entry
from jaxrl.inference.engine import Engine
from jaxrl.inference.prefilling import Job, next_call
from jaxrl.inference.prefixes import Block, PrefixCache, piece_keys
from jaxrl.inference.requests import Request
from jaxrl.inference.steps import Params

InFlight = Literal["finish", "continue", "recompute"]
IN_FLIGHT: tuple[InFlight, ...] = ("finish", "continue", "recompute")
_LEAST_PREFIX_BYTES = 64 << 20


@dataclasses.dataclass(slots=True)
class Counts:
    """What a batcher has done since it was made.

    `prefills` counts prompts of which a part was computed, `prefix_hits` requests that used the
    prefill of an earlier request for all of theirs, `recomputed` sequences prefilled again because
    of new weights. Of `prefix_tokens` in all prompts, `prefix_hit_tokens` were not computed.
    """

    tokens: int = 0
    dispatches: int = 0
    prefills: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed: int = 0


class Batcher:
    """Requests in slots. `in_flight` says what becomes of running requests when weights change.

    `prefix_cache_bytes` bounds the pieces of prompts that are kept (None: a quarter of the slots'
    cache, at least 64 MiB). `prefill_budget` is about how many tokens of prompts, with their
    padding, are computed between two dispatches while sequences run (None: all that wait).
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        version: int,
        *,
        in_flight: InFlight,
        prefix_cache_bytes: int | None = None,
        prefill_budget: int | None = None,
    ) -> None:
        if prefix_cache_bytes is None:
            prefix_cache_bytes = max(_LEAST_PREFIX_BYTES, engine.cache_bytes // 4)
        self.engine = engine
        self.in_flight = in_flight
        self.counts = Counts()
        self.version = version
        self.prefixes = PrefixCache(prefix_cache_bytes)
        self._budget = prefill_budget
        self._weights: dict[int, Params] = {version: params}
        self._rows: list[Request | None] = [None] * engine.slots
        self._row_version = [version] * engine.slots
        self._jobs: list[Job] = []
        self._fresh: list[int] = []
        self._state = engine.init_state()

    def release(self) -> None:
        """Give up the slots' memory; nothing can be decoded any more."""
        self._state = None

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
                self._leave_job(slot)
        self._forget_old_weights()

    def swap(self, params: Params, version: int) -> None:
        """New requests use the new weights; running ones follow the in-flight policy."""
        self._weights[version] = params
        self.version = version
        # Keys and values of other weights must never serve a new request: their keys would not
        # match, and nobody needs them any more.
        self.prefixes.clear()
        if self.in_flight != "finish":
            for job in self._jobs:
                job.restart(version)
            if self.in_flight == "recompute":
                self._recompute()
            self._row_version = [version] * self.engine.slots
        self._forget_old_weights()

    def admit(self, requests: Sequence[Request]) -> None:
        """Puts requests (not more than free slots) into slots, in order."""
        for slot, request in zip(self.free_slots, requests, strict=False):
            self._rows[slot] = request
            self._row_version[slot] = self.version
            self.counts.prefix_tokens += len(request.prompt)
            job = self._job_for(request)
            if job is None:
                self._jobs.append(self._new_job(request.prompt, slot))
            else:
                job.slots.append(slot)
                self.counts.prefix_hits += 1
                self.counts.prefix_hit_tokens += len(request.prompt)

    def step(self, waiting: Sequence[Request] = ()) -> list[Request]:
        """Computes prompts, then one dispatch for each version in use -> the requests that
        finished.

        `waiting` are the next requests in the queue; the dispatch ends early once enough slots are
        free to be worth an admission.
        """
        self._prefill()
        self._tell_first_tokens()
        slots, leave_at = self._decoding(), self._worth_leaving(waiting)
        versions = sorted({self._row_version[slot] for slot in slots})
        dispatches = [self._dispatch(version, slots, leave_at) for version in versions]
        # Here the host waits for the device: one transfer for k tokens a slot.
        results = [(chosen, np.asarray(result)) for chosen, result in dispatches]
        done = []
        for chosen, values in results:
            for slot in chosen:
                request = self._rows[slot]
                before = request.given
                request.take(values[slot])
                self.counts.tokens += request.given - before
                if request.finished:
                    done.append(request)
                    self._rows[slot] = None
        self._forget_old_weights()
        return done

    def _decoding(self) -> list[int]:
        """Slots whose prompt is complete."""
        prefilling = {slot for job in self._jobs for slot in job.slots}
        rows = enumerate(self._rows)
        return [slot for slot, request in rows if request is not None and slot not in prefilling]

    def _worth_leaving(self, waiting: Sequence[Request]) -> int | None:
        """How many slots shall be free before a dispatch ends early; None: it need not.

        A prefill of several prompts costs hardly more than one of a single prompt, so that slots
        wait for each other, unless the next request needs no prefill.
        """
        if not waiting:
            return None
        prompt, chunk = waiting[0].prompt, self.engine.prefill_chunk
        if self.prefixes.holds(piece_keys(prompt, chunk, self.version)):
            return 1
        bucket = self.engine.prefill_bucket(min(len(prompt), chunk))
        return min(len(waiting), self.engine.rows_of(bucket))

    def _dispatch(
        self, version: int, decoding: Sequence[int], leave_at: int | None
    ) -> tuple[list[int], object]:
        slots = [slot for slot in decoding if self._row_version[slot] == version]
        mask = np.zeros(self.engine.slots, bool)
        mask[slots] = True
        chosen = [self._rows[slot] for slot in slots]
        # Few while prompts wait for their next piece.
        k = self.engine.steps_per_dispatch
        k = max(1, k // 4) if self._jobs else k
        self._state, result = self.engine.generate(
            self._weights[version],
            self._state,
            version=version,
            mask=mask,
            longest=max(min(r.length + k, r.longest) for r in chosen),
            max_steps=k,
            leave_at=leave_at,
        )
        self.counts.dispatches += 1
        return slots, result

    def _tell_first_tokens(self) -> None:
        """Tells readers what their prefills have drawn: the dispatch that gives it out takes as
        long as all its tokens together."""
        if not self._fresh:
            return
        rows = np.asarray(self.engine.peek(self._state))
        for slot in self._fresh:
            self._rows[slot].tell(rows[slot])
        self._fresh.clear()

    # ---- prompts -------------------------------------------------------------------------------

    def _job_for(self, request: Request) -> Job | None:
        """That of the same prompt under the same weights, if there is one."""
        for job in self._jobs:
            same = job.version == self.version and not job.resume
            if same and np.array_equal(job.prompt, request.prompt):
                return job
        return None

    def _new_job(self, prompt: np.ndarray, slot: int, *, resume: bool = False) -> Job:
        version, chunk = self.version, self.engine.prefill_chunk
        return Job(prompt, version, chunk, [slot], resume)

    def _prefill(self) -> None:
        """Computes what waits, within the budget while sequences run; one call at least."""
        spent = 0
        while self._jobs:
            self._take_cached()
            if not self._jobs:
                return
            chosen = next_call(self._jobs, self.engine)
            bucket = self.engine.prefill_bucket(chosen[0].next_length)
            cost = bucket * self.engine.rows_of(bucket)
            bounded = self._budget is not None and self._decoding()
            if bounded and spent and spent + cost > self._budget:
                return
            spent += cost
            self._compute(chosen)

    def _take_cached(self) -> None:
        """Moves every job on over the pieces that earlier requests have computed."""
        for job in list(self._jobs):
            computed = job.done
            while job in self._jobs and (block := self.prefixes.get(job.key)) is not None:
                self._place([(job, block)])
            hit = job.done - computed
            self.counts.prefix_hit_tokens += 0 if job.resume else hit
            whole = hit == len(job.prompt)
            self.counts.prefix_hits += whole and not job.resume

    def _compute(self, jobs: list[Job]) -> None:
        """One call for the next pieces of these jobs."""
        version = jobs[0].version
        pieces = [job.piece() for job in jobs]
        prefix = self.engine.prefill(self._weights[version], pieces, version, self._state)
        for row, job in enumerate(jobs):
            self.counts.prefills += job.next_is_last and not job.resume
            if version == self.version:
                self.prefixes.put(job.key, (prefix, row))
        self._place([(job, (prefix, row)) for row, job in enumerate(jobs)])

    def _place(self, placed: list[tuple[Job, Block]]) -> None:
        """Puts the computed next pieces, rows of one prefix, where they belong."""
        prefix = placed[0][1][0]
        kept: list[Entry] = []
        started: list[Entry] = []
        for job, block in placed:
            last = job.next_is_last
            if last and job.done and len(job.slots) > 1:
                source, *targets = job.slots
                self._state = self.engine.spread(self._state, source, targets, job.done)
            group = started if last and not job.resume else kept
            group += job.entries(block, self._rows)
            job.done += job.next_length
            if last:
                self._jobs.remove(job)
        if kept:
            self._state = self.engine.insert(prefix, self._state, kept, resume=True)
        if started:
            self._state = self.engine.insert(prefix, self._state, started)
            slots = [entry.slot for entry in started]
            self._fresh += [slot for slot in slots if self._rows[slot].channel is not None]

    def _leave_job(self, slot: int) -> None:
        """Takes a slot out of the job that is filling it; the next one goes on where it was."""
        for job in self._jobs:
            if slot not in job.slots:
                continue
            first = job.slots[0] == slot
            job.slots.remove(slot)
            if not job.slots:
                self._jobs.remove(job)
            elif first and job.done:
                self._state = self.engine.spread(self._state, slot, job.slots[:1], job.done)
            return

    def _recompute(self) -> None:
        """Lets the caches of running requests be filled again, with the present weights."""
        slots = self._decoding()
        self._jobs += [
            self._new_job(self._rows[slot].tokens(), slot, resume=True) for slot in slots
        ]
        self.counts.recomputed += len(slots)

    def _forget_old_weights(self) -> None:
        """Lets go of weights that no running request and no new one will use."""
        rows = zip(self._rows, self._row_version, strict=True)
        used = {self.version, *(version for request, version in rows if request is not None)}
        self._weights = {v: weights for v, weights in self._weights.items() if v in used}
