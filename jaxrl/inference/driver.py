"""The driver: one thread that owns the decode state and serves requests from any event loop.

Callers only leave requests in a queue and wait on futures; the lock is never held while the device
works, so that nothing here blocks an event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxrl.errors import DeadlineError, DriverError, QueueFullError
from jaxrl.inference.answers import answer, failure_of
from jaxrl.inference.batcher import IN_FLIGHT, Batcher, InFlight
from jaxrl.inference.engine import Engine
from jaxrl.inference.pages import use_large_pages
from jaxrl.inference.prefixes import bytes_instead
from jaxrl.inference.requests import Limits, Request, check_request, deadline_of
from jaxrl.inference.stats import DriverStats
from jaxrl.inference.steps import Params
from jaxrl.inference.streaming import Channel, TokenStream
from jaxrl.types import Completion, SamplingParams, WeightVersion
from jaxrl.weights.digest import verify as verify_digest
from jaxrl.weights.exchange import check_newer, check_number


class Driver:
    """Serves an engine under continuous batching; a `Sampler`.

    `params` and those given to `set_weights` belong to the driver from then on: nobody may donate
    or change them (`jaxrl.weights.exchange.publish` makes such a copy). With `verify`, their digest
    is computed and must be that of `version`. `in_flight` is what happens to running requests when
    weights change: "finish" under the old ones, "continue" with the new ones over the old cache, or
    "recompute" the cache under the new ones. `tokenizer` (optional) turns completions into text.

    At most `max_waiting` requests wait for a slot (None: any number). Prompts' beginnings are kept
    for later prompts in `prefix_cache_bytes` on the devices (None: a quarter of the slots' cache,
    at least 64 MiB; 0: none). Between two dispatches, about `prefill_budget` tokens of prompts are
    computed while sequences run: one call of the engine at least (None: all that wait), so that a
    long prompt does not hold running streams up. `prefix_cache` is deprecated.

    Raises ValueError for an unknown policy or weights that do not fit the engine, and
    WeightVersionError if the digest differs.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        version: WeightVersion,
        *,
        in_flight: InFlight = "continue",
        tokenizer: Any = None,
        verify: bool = True,
        prefix_cache: int | None = None,
        prefix_cache_bytes: int | None = None,
        prefill_budget: int | None = None,
        max_waiting: int | None = None,
    ) -> None:
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight={in_flight!r} must be one of {', '.join(IN_FLIGHT)}")
        if prefix_cache is not None:
            prefix_cache_bytes = bytes_instead(prefix_cache, prefix_cache_bytes)
        sizes = {"prefix_cache_bytes": prefix_cache_bytes, "max_waiting": max_waiting}
        for name, value in {**sizes, "prefill_budget": prefill_budget}.items():
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} must be at least 0")
        engine.check_params(params)
        check_number(version)
        if verify:
            verify_digest(params, version)
        use_large_pages(params)
        self.engine = engine
        self.tokenizer = tokenizer
        self._verify = verify
        self._limits = Limits(
            engine.model.config.vocab_size,
            engine.max_length,
            engine.max_stop_tokens,
            engine.top_logprobs,
        )
        self._batcher = Batcher(
            engine,
            params,
            version.number,
            in_flight=in_flight,
            prefix_cache_bytes=prefix_cache_bytes,
            prefill_budget=prefill_budget,
        )
        self._max_waiting = max_waiting
        self._version = version
        self._thread: threading.Thread | None = None
        self._swap_order = threading.Lock()
        # Guards everything below; waited on by the driver's thread and by `drain`.
        self._changed = threading.Condition()
        self._waiting: dict[int, Request] = {}
        self._swap: tuple[Params, WeightVersion, Future] | None = None
        self._stopping = False
        self._draining = False
        self._turning = False
        self._failed = False
        self._closed: DriverError | None = None
        self._ended: Future = Future()
        self._arrivals = 0
        self._finished = 0
        self._cancelled = 0
        self._expired = 0
        self._refused = 0
        self._busy = 0.0

    def start(self, *, prefill_buckets: Sequence[int] | None = None) -> Driver:
        """Compiles the engine's programs if need be and starts the thread. Raises DriverError.

        `prefill_buckets`: as for `Engine.warm_up`.
        """
        if self._thread is not None:
            raise DriverError("the driver has been started already")
        self.engine.warm_up(prefill_buckets=prefill_buckets)
        self._thread = threading.Thread(target=self._run, name="jaxrl-driver", daemon=True)
        self._thread.start()
        return self

    def stop(self, timeout: float = 60.0) -> None:
        """Ends the thread after its present dispatch; requests that are left get DriverError.

        Raises DeadlineError if a dispatch has not ended after `timeout` seconds; even then nobody
        is left waiting. Further calls do nothing.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        alive = False
        if self._thread is not None:
            self._thread.join(min(timeout, threading.TIMEOUT_MAX))
            alive = self._thread.is_alive()
        self._close(None)
        if alive:
            raise DeadlineError(f"the driver's dispatch did not end within timeout={timeout} s")

    def drain(self, timeout: float = 60.0) -> bool:
        """Admits nothing more and waits for what is there; True if all of it ended in time.

        Later requests get DriverError. `stop` then ends the driver.
        """
        with self._changed:
            self._draining = True
            most = min(timeout, threading.TIMEOUT_MAX)
            over = self._changed.wait_for(lambda: self._closed or self._idle(), most)
            return bool(over)

    def add_done_callback(self, function: Callable[[], None]) -> None:
        """Calls `function` once the driver has stopped or failed, from the thread that ended it (at
        once if that was before)."""
        self._ended.add_done_callback(lambda _: function())

    @property
    def failure(self) -> DriverError | None:
        """Why the driver has failed; None while it works, and after an orderly stop."""
        return self._closed if self._failed else None

    def __enter__(self) -> Driver:
        return self.start() if self._thread is None else self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def version(self) -> WeightVersion:
        """The weights that a request arriving now would be served with."""
        return self._version

    def submit(
        self, tokens: Any, params: SamplingParams, *, timeout: float | None = None
    ) -> Future:
        """Queues a request -> a future of its Completion; cancelling it frees its slot.

        tokens int [P]. Raises RequestError for a request that cannot be served, QueueFullError if
        `max_waiting` requests wait, and DriverError if the driver has failed, stopped or drains. A
        driver not yet started keeps it until `start`. After `timeout` seconds the future has
        DeadlineError, and the slot is free at the next dispatch.
        """
        return self._enqueue(tokens, params, None, timeout)

    def stream(
        self, tokens: np.ndarray, params: SamplingParams, *, timeout: float | None = None
    ) -> TokenStream:
        """Queues a request -> its tokens as they are decoded, for `for` or `async for`.

        Errors as for `submit`; those of a request on its way come out of the stream.
        """
        channel = Channel()
        future = self._enqueue(tokens, params, channel, timeout)
        future.add_done_callback(lambda _: channel.end())
        return TokenStream(future, channel)

    def _enqueue(
        self, tokens: Any, params: SamplingParams, channel: Channel | None, timeout: float | None
    ) -> Future:
        prompt, params = check_request(tokens, params, self._limits)
        deadline = deadline_of(timeout)
        with self._changed:
            self._check_open()
            if self._max_waiting is not None and len(self._waiting) >= self._room():
                self._refused += 1
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait: max_waiting={self._max_waiting} is the "
                    "most; try again later"
                )
            request = Request(self._arrivals, prompt, params, Future(), channel, deadline)
            self._arrivals += 1
            self._waiting[request.number] = request
            self._changed.notify_all()
        request.future.add_done_callback(lambda future: self._forget(request))
        return request.future

    def _check_open(self) -> None:
        """Raises DriverError if nothing is admitted any more."""
        if self._closed is not None:
            raise DriverError(str(self._closed)) from self._closed.__cause__
        if self._draining:
            raise DriverError("the driver is being stopped and admits nothing more")

    def _room(self) -> int:
        """How many requests may be queued: those that wait, and those that find a slot at once."""
        return self._max_waiting + len(self._batcher.free_slots)

    async def sample(
        self, tokens: np.ndarray, params: SamplingParams, *, timeout: float | None = None
    ) -> Completion:
        """tokens int [P] -> the completion; from any event loop. Errors as for `submit`.

        Cancelling the task removes a waiting request at once and frees the slot of a running one
        at the next dispatch.
        """
        return await asyncio.wrap_future(self.submit(tokens, params, timeout=timeout))

    def sample_blocking(
        self, tokens: np.ndarray, params: SamplingParams, *, timeout: float | None = None
    ) -> Completion:
        """`sample` for code without an event loop. Raises DeadlineError after `timeout` seconds."""
        future = self.submit(tokens, params)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            future.cancel()
            raise DeadlineError(f"no completion within timeout={timeout} s") from error

    def generate(
        self, text: str, *, max_tokens: int = 128, temperature: float = 1.0, seed: int = 0
    ) -> str:
        """text -> the text that follows it, up to a token that ends a text."""
        if self.tokenizer is None:
            raise DriverError("generate needs a driver with a tokenizer")
        ids = [*getattr(self.tokenizer, "prompt_prefix", ()), *self.tokenizer.encode(text)]
        prompt = np.array(ids, np.int32)
        stops = getattr(self.tokenizer, "stop_ids", (self.tokenizer.eos_id,))
        params = SamplingParams(max_tokens, temperature, seed, tuple(stops))
        return self.sample_blocking(prompt, params).text

    def set_weights(self, params: Params, version: WeightVersion) -> None:
        """Serves `params` from the next dispatch on; returns once they are in place.

        Blocks for the digest and the present dispatch, so call it from a thread, not a coroutine.
        Raises WeightVersionError if the digest differs from that of `version` or its number is
        lower than the present one or needs more than 32 bits, ValueError if the weights do not fit
        the engine: then the old weights go on serving. Raises DriverError if the driver has failed
        or stopped.
        """
        self.engine.check_params(params)
        check_number(version)
        if self._verify:
            verify_digest(params, version)
        use_large_pages(params)
        with self._swap_order:
            check_newer(self._version, version)
            if version == self._version:
                return
            accepted: Future = Future()
            with self._changed:
                if self._closed is not None:
                    raise DriverError(str(self._closed)) from self._closed.__cause__
                if self._thread is None:
                    self._batcher.swap(params, version.number)
                    accepted.set_result(None)
                else:
                    self._swap = (params, version, accepted)
                    self._changed.notify_all()
            # Bounded: the thread answers between two dispatches, and _close answers if it ends.
            accepted.result()
            self._version = version

    def stats(self) -> DriverStats:
        """The driver's counts at this moment."""
        counts = dataclasses.asdict(self._batcher.counts)
        with self._changed:
            return DriverStats(
                waiting=len(self._waiting),
                running=len(self._batcher.running),
                slots=self.engine.slots,
                version=self._version.number,
                live_versions=self._batcher.live_versions,
                finished=self._finished,
                cancelled=self._cancelled,
                compile_count=self.engine.compile_count,
                busy_seconds=self._busy,
                prefix_bytes=self._batcher.prefixes.nbytes,
                prefix_limit_bytes=self._batcher.prefixes.limit_bytes,
                prefix_evictions=self._batcher.prefixes.evictions,
                kv_bytes=self.engine.cache_bytes,
                expired=self._expired,
                refused=self._refused,
                **counts,
            )

    # ---- the driver's thread -------------------------------------------------------------------

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while self._wait_for_work():
                began = time.perf_counter()
                self._turn()
                self._busy += time.perf_counter() - began
        except BaseException as error:
            cause = error
        finally:
            self._close(cause)
            self._batcher.release()

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False when the driver shall stop."""
        with self._changed:
            self._turning = False
            self._changed.notify_all()
            busy = bool(self._batcher.running)
            self._changed.wait_for(lambda: busy or self._waiting or self._swap or self._stopping)
            self._turning = not self._stopping
            return self._turning

    def _idle(self) -> bool:
        """Whether every request so far has ended."""
        return not (self._turning or self._waiting or self._batcher.running)

    def _turn(self) -> None:
        """What happens between two dispatches, and one dispatch."""
        batcher = self._batcher
        self._expire()
        # A future that is done while its request runs was cancelled, or its time is over.
        batcher.drop(lambda request: request.future.done())
        self._apply_swap()
        admitted, following = self._take_waiting(len(batcher.free_slots))
        if admitted:
            self._admit(admitted)
        if batcher.running:
            for request in batcher.step(following):
                self._resolve(request)

    def _expire(self) -> None:
        """Fails the requests whose time is over, waiting and running."""
        now = time.monotonic()
        with self._changed:
            late = [request for request in self._waiting.values() if request.deadline <= now]
            for request in late:
                del self._waiting[request.number]
            late += [request for request in self._batcher.running if request.deadline <= now]
        for request in late:
            tokens = f"{request.given} of at most {request.params.max_tokens} tokens"
            error = DeadlineError(f"the request's time is over; {tokens} were decoded")
            if answer(request.future, error):
                self._expired += 1

    def _admit(self, requests: list[Request]) -> None:
        try:
            self._batcher.admit(requests)
        except BaseException:
            # Back into the queue, where _close finds everyone who must hear of the failure.
            with self._changed:
                self._waiting.update((request.number, request) for request in requests)
            raise

    def _apply_swap(self) -> None:
        with self._changed:
            swap = self._swap
        if swap is None:
            return
        params, version, accepted = swap
        # If this raises, the driver fails, and _close tells the caller of set_weights.
        self._batcher.swap(params, version.number)
        with self._changed:
            self._swap = None
        answer(accepted, None)

    def _take_waiting(self, room: int) -> tuple[list[Request], list[Request]]:
        """Up to `room` requests in the order of arrival, and the next few that stay."""
        with self._changed:
            numbers = list(itertools.islice(self._waiting, room))
            taken = [self._waiting.pop(number) for number in numbers]
            following = itertools.islice(self._waiting.values(), self.engine.slots)
            return taken, list(following)

    def _resolve(self, request: Request) -> None:
        try:
            completion = request.completion(self.tokenizer)
        except Exception as error:
            answer(request.future, error)
        else:
            self._finished += 1
            answer(request.future, completion)

    def _forget(self, request: Request) -> None:
        """Runs when a future is done: takes a cancelled request out of the queue."""
        if not request.future.cancelled():
            return
        with self._changed:
            self._cancelled += 1
            self._waiting.pop(request.number, None)

    def _close(self, cause: BaseException | None) -> None:
        """Refuses new requests and fails those that are left."""
        with self._changed:
            if self._closed is None:
                self._failed = cause is not None
                self._closed = (
                    DriverError("the driver was stopped") if cause is None else failure_of(cause)
                )
            left = [*self._waiting.values(), *self._batcher.running]
            self._waiting.clear()
            swap, self._swap = self._swap, None
        futures = [request.future for request in left]
        if swap is not None:
            futures.append(swap[2])
        for future in futures:
            error = DriverError(str(self._closed))
            error.__cause__ = self._closed.__cause__
            answer(future, error)
        with self._changed:
            self._changed.notify_all()
        answer(self._ended, None)
