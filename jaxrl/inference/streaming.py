"""A completion handed out while it is being decoded, to a loop or to a coroutine."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
from concurrent.futures import Future, InvalidStateError

import numpy as np

from jaxrl.types import Completion


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """What one dispatch gave: `tokens` int32 [k], `logprobs` float32 [k], `versions` int32 [k].

    All chunks together are the arrays of the `Completion`, bit for bit; so are `top_tokens` and
    `top_logprobs` [k, N], where they were asked for.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


class TokenStream:
    """The chunks of one request, for `for` or `async for`, and then its `completion`.

    >>> with driver.stream(tokens, params) as stream:  # doctest: +SKIP
    ...     for chunk in stream:
    ...         print(chunk.tokens)

    One consumer takes from it, at its own pace: chunks wait, the driver does not. Who leaves early
    (by `close`, at the end of `with`, or by letting go of the stream) cancels the request, which
    frees its slot; taking from it then raises `CancelledError`. Where the request fails, its error
    follows the chunks that came before it.
    """

    def __init__(self, future: Future, channel: Channel):
        self._future = future
        self._channel = channel

    @property
    def completion(self) -> Completion:
        """The whole completion; waits for it. Raises as `Driver.submit`'s future does."""
        return self._future.result()

    def close(self) -> None:
        """Cancel the request unless it has ended; may be repeated."""
        self._future.cancel()

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Chunk:
        waiter = self._channel.take()
        try:
            chunk = waiter.result()
        except BaseException:  # Ctrl-C
            self._channel.give_back(waiter)
            raise
        if chunk is None:
            self._raise_failure()
            raise StopIteration
        return chunk

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Chunk:
        waiter = self._channel.take()
        try:
            chunk = await asyncio.wrap_future(waiter)
        except asyncio.CancelledError:
            self._channel.give_back(waiter)
            raise
        if chunk is None:
            self._raise_failure()
            raise StopAsyncIteration
        return chunk

    def _raise_failure(self) -> None:
        # The channel ends when the future is done: nothing is waited for here.
        self._future.result(timeout=0)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Channel:
    """From the driver's thread to one consumer. The driver holds this, never the stream itself, so
    that a stream which its consumer forgets is collected."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: collections.deque[Chunk] = collections.deque()
        self._waiter: Future | None = None
        self._ended = False

    def put(self, chunk: Chunk) -> None:
        """Hand a chunk over; never blocks."""
        with self._lock:
            self._chunks.append(chunk)
            self._answer()

    def end(self) -> None:
        """No chunk follows."""
        with self._lock:
            self._ended = True
            self._answer()

    def take(self) -> Future:
        """A future of the next chunk, or of None after the last one."""
        with self._lock:
            self._waiter = Future()
            waiter = self._waiter
            self._answer()
            return waiter

    def give_back(self, waiter: Future) -> None:
        """The consumer was interrupted while it waited: the chunk is for the next time."""
        with self._lock:
            if waiter.cancel() or waiter.cancelled():
                self._waiter = None
            elif (chunk := waiter.result()) is not None:
                self._chunks.appendleft(chunk)

    def _answer(self) -> None:
        if self._waiter is None or not (self._chunks or self._ended):
            return
        waiter, self._waiter = self._waiter, None
        # A waiter that was cancelled in this moment gets nothing, and the chunk stays.
        with contextlib.suppress(InvalidStateError):
            waiter.set_result(self._chunks[0] if self._chunks else None)
            if self._chunks:
                self._chunks.popleft()
