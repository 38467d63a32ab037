"""A completion handed out while it is being decoded, to a loop or to a coroutine."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
import weakref
from concurrent.futures import Future

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
        chunk = self._channel.wait()
        if chunk is None:
            self._raise_failure()
            raise StopIteration
        return chunk

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self._channel.arrival()
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
        self._changed = threading.Condition()
        self._chunks: collections.deque[Chunk] = collections.deque()
        self._waiter: tuple[_Wakes, asyncio.Future] | None = None
        self._ended = False

    def put(self, chunk: Chunk) -> None:
        """Hand a chunk over; never blocks."""
        with self._changed:
            self._chunks.append(chunk)
            self._wake()

    def end(self) -> None:
        """No chunk follows."""
        with self._changed:
            self._ended = True
            self._wake()

    def wait(self) -> Chunk | None:
        """The next chunk, or None after the last one; blocks until it is there."""
        with self._changed:
            self._changed.wait_for(self._ready)
            return self._next()

    async def arrival(self) -> Chunk | None:
        """As `wait`, for a coroutine. Who is cancelled meanwhile has taken nothing."""
        while True:
            with self._changed:
                if self._ready():
                    return self._next()
                loop = asyncio.get_running_loop()
                waiter = loop.create_future()
                self._waiter = (_wakes_of(loop), waiter)
            await waiter

    def _ready(self) -> bool:
        return bool(self._chunks) or self._ended

    def _next(self) -> Chunk | None:
        return self._chunks.popleft() if self._chunks else None

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._waiter is not None:
            (wakes, waiter), self._waiter = self._waiter, None
            wakes.add(waiter)


class _Wakes:
    """Futures of one loop that other threads end. The loop is called once for all that come before
    it gets to it: a dispatch has news for every stream at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[asyncio.Future] = []

    def add(self, waiter: asyncio.Future) -> None:
        """End this one, from any thread."""
        with self._lock:
            self._waiters.append(waiter)
            called = len(self._waiters) > 1
        if not called:
            # A loop that is closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                waiter.get_loop().call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():  # its consumer may have been cancelled
                waiter.set_result(None)


_WAKES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Wakes] = weakref.WeakKeyDictionary()
_WAKES_LOCK = threading.Lock()


def _wakes_of(loop: asyncio.AbstractEventLoop) -> _Wakes:
    """The one object of a loop."""
    with _WAKES_LOCK:
        if loop not in _WAKES:
            _WAKES[loop] = _Wakes()
        return _WAKES[loop]
