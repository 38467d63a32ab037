"""The driver: one thread that owns the decode state and serves requests from any event loop.

Callers only leave requests in a queue and wait on futures; the lock is never held while the device
works, so that nothing here blocks an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import numpy as np

from jaxrl.errors import DeadlineError, DriverError, WeightVersionError
from jaxrl.inference.batcher import IN_FLIGHT, Batcher, InFlight
from jaxrl.inference.engine import Engine
from jaxrl.inference.requests import Limits, Request, check_request
from jaxrl.inference.steps import Params
from jaxrl.inference.streaming import Channel, TokenStream
from jaxrl.types import Completion, SamplingParams, WeightVersion
from jaxrl.weights.digest import verify as verify_digest


@dataclasses.dataclass(frozen=True, slots=True)
class DriverStats:
    """A driver's counts. `busy_seconds` is the time its thread has spent on work."""

    waiting: int
    running: int
    slots: int
    version: int
    live_versions: tuple[int, ...]
    finished: int
    cancelled: int
    tokens: int
    dispatches: int
    prefills: int
    prefix_hits: int
    recomputed: int
    compile_count: int
    busy_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per busy second; 0 before the first."""
        return self.tokens / self.busy_seconds if self.busy_seconds else 0.0


class Driver:
    """Serves an engine under continuous batching; a `Sampler`.

    `params` and those given to `set_weights` belong to the driver from then on: nobody may donate
    or change them (`jaxrl.weights.exchange.publish` makes such a copy). With `verify`, their digest
    is computed and must be that of `version`. `in_flight` is what happens to running requests when
    weights change: "finish" under the old ones, "continue" with the new ones over the old cache, or
    "recompute" the cache under the new ones. `prefix_cache` prompts are kept to serve later samples
    of the same prompt. `tokenizer` (optional) turns completions into text.

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
        prefix_cache: int = 8,
    ) -> None:
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight={in_flight!r} must be one of {', '.join(IN_FLIGHT)}")
        engine.check_params(params)
        if verify:
            verify_digest(params, version)
        self.engine = engine
        self.tokenizer = tokenizer
        self._verify = verify
        self._limits = Limits(
            engine.model.config.vocab_size, engine.max_length, engine.max_stop_tokens
        )
        self._batcher = Batcher(
            engine, params, version.number, in_flight=in_flight, prefix_cache=prefix_cache
        )
        self._version = version
        self._thread: threading.Thread | None = None
        self._swap_order = threading.Lock()
        # Guards everything below; waited on by the driver's thread alone.
        self._changed = threading.Condition()
        self._waiting: dict[int, Request] = {}
        self._swap: tuple[Params, WeightVersion, Future] | None = None
        self._stopping = False
        self._closed: DriverError | None = None
        self._arrivals = 0
        self._finished = 0
        self._cancelled = 0
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
            self._changed.notify()
        alive = False
        if self._thread is not None:
            self._thread.join(timeout)
            alive = self._thread.is_alive()
        self._close(None)
        if alive:
            raise DeadlineError(f"the driver's dispatch did not end within timeout={timeout} s")

    def __enter__(self) -> Driver:
        return self.start() if self._thread is None else self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def version(self) -> WeightVersion:
        """The weights that a request arriving now would be served with."""
        return self._version

    def submit(self, tokens: Any, params: SamplingParams) -> Future:
        """Queues a request -> a future of its Completion; cancelling it frees its slot.

        tokens int [P]. Raises RequestError for a request that cannot be served and DriverError if
        the driver has failed or stopped. A driver not yet started keeps it until `start`.
        """
        return self._enqueue(tokens, params, None)

    def stream(self, tokens: np.ndarray, params: SamplingParams) -> TokenStream:
        """Queues a request -> its tokens as they are decoded, for `for` or `async for`.

        Errors as for `submit`; those of a request on its way come out of the stream.
        """
        channel = Channel()
        future = self._enqueue(tokens, params, channel)
        future.add_done_callback(lambda _: channel.end())
        return TokenStream(future, channel)

    def _enqueue(self, tokens: Any, params: SamplingParams, channel: Channel | None) -> Future:
        prompt = check_request(tokens, params, self._limits)
        with self._changed:
            if self._closed is not None:
                raise DriverError(str(self._closed)) from self._closed.__cause__
            request = Request(self._arrivals, prompt, params, Future(), channel)
            self._arrivals += 1
            self._waiting[request.number] = request
            self._changed.notify()
        request.future.add_done_callback(lambda future: self._forget(request))
        return request.future

    async def sample(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        """tokens int [P] -> the completion; from any event loop. Errors as for `submit`.

        Cancelling the task removes a waiting request at once and frees the slot of a running one
        at the next dispatch.
        """
        return await asyncio.wrap_future(self.submit(tokens, params))

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
        lower than the present one, ValueError if the weights do not fit the engine: then the old
        weights go on serving. Raises DriverError if the driver has failed or stopped.
        """
        self.engine.check_params(params)
        if self._verify:
            verify_digest(params, version)
        with self._swap_order:
            self._check_newer(version)
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
                    self._changed.notify()
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
                **counts,
            )

    def _check_newer(self, version: WeightVersion) -> None:
        present = self._version
        if version.number < present.number:
            raise WeightVersionError(
                f"weights {version} are older than the present {present}: numbers must not fall"
            )
        if version.number == present.number and version.digest != present.digest:
            raise WeightVersionError(
                f"weights {version} and the present {present} have one number but differ"
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

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False when the driver shall stop."""
        with self._changed:
            busy = bool(self._batcher.running)
            self._changed.wait_for(lambda: busy or self._waiting or self._swap or self._stopping)
            return not self._stopping

    def _turn(self) -> None:
        """What happens between two dispatches, and one dispatch."""
        batcher = self._batcher
        # A future that is done while its request runs was cancelled.
        batcher.drop(lambda request: request.future.done())
        self._apply_swap()
        admitted, following = self._take_waiting(len(batcher.free_slots))
        if admitted:
            self._admit(admitted)
        if batcher.running:
            for request in batcher.step(following):
                self._resolve(request)

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
        _answer(accepted, None)

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
            _answer(request.future, error)
        else:
            self._finished += 1
            _answer(request.future, completion)

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
                self._closed = (
                    DriverError("the driver was stopped") if cause is None else _failure(cause)
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
            _answer(future, error)


def _failure(cause: BaseException) -> DriverError:
    error = DriverError(f"the decode engine failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _answer(future: Future, answer: Completion | Exception | None) -> None:
    """Answers a future that may have been answered or cancelled in the meantime."""
    give = future.set_exception if isinstance(answer, Exception) else future.set_result
    with contextlib.suppress(InvalidStateError):
        give(answer)
