"""A `Sampler` whose completions are made by servers that follow the trainer's run.

One thread with an event loop of its own talks to all servers, so that requests may come from any
loop, as with the driver. A watch of each server asks again and again what it serves; requests go
only to those that serve a version that the trainer published and can still use. Whatever comes
back is proven: the digests of its versions must be those that were published.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

import aiohttp
import numpy as np

from jaxrl.errors import DeadlineError, DriverError, JaxrlError
from jaxrl.observe.logger import get_logger
from jaxrl.serving.remote import BusyError, CutError, RemoteServer, no_longer_than
from jaxrl.serving.watched import Needs, Watched
from jaxrl.types import Completion, SamplingParams, WeightVersion

MAX_CUTS = 5
"""How often one request may be cut before it is an error."""

POLL_S = 2.0
"""How long a watch waits for an answer, and how often it asks when there is nothing to wait for."""

REST_S, AGAIN_S = 0.2, 0.25
"""Pauses after a server was busy, and after it could not be reached."""

_LOGGER = get_logger("serving")


class RemoteSampler:
    """Samples through the servers at `urls`, which follow one run.

    `token` is what they ask for (None: nothing); `wait_s` bounds the waiting for a server that can
    take a request. `tokenizer` turns completions into text. `start` before use, `stop` at the end.
    """

    def __init__(
        self,
        urls: Sequence[str],
        needs: Needs,
        *,
        tokenizer: Any = None,
        token: str | None = None,
        wait_s: float = 300.0,
    ):
        self.tokenizer = tokenizer
        self.tokens = 0
        self._urls, self._needs, self._token, self._wait_s = urls, needs, token, wait_s
        self._published: dict[int, str] = {}
        self._wanted: WeightVersion | None = None
        self._oldest = 0
        self._servers: list[Watched] = []
        self._failure: Exception | None = None
        self._turn = 0
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._thread = Thread(target=self._serve, name="jaxrl-samplers", daemon=True)

    # From any thread.

    def start(self) -> RemoteSampler:
        """Begin to watch the servers; returns at once."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def stop(self) -> None:
        """Cut what is under way; may be repeated."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def publish(self, version: WeightVersion, *, oldest: int) -> None:
        """`version` is about to appear in the store; from now on no request goes to a server whose
        version is below `oldest`. Returns at once."""
        self._published[version.number] = version.digest
        self._wanted, self._oldest = version, oldest
        self._loop.call_soon_threadsafe(self._tell)

    def wait_until_reached(self) -> None:
        """Wait until every server has answered. Raises as `wait_until_ready` does."""
        self._wait_for_all("answer", lambda server: server.reached)

    def wait_until_ready(self) -> None:
        """Wait until every server serves the version that was published last.

        Raises `DeadlineError` after `wait_s` seconds, `ConfigError` for a server that does not fit,
        `AuthenticationError` and `WeightVersionError`; the message names the server.
        """
        wanted = next(reversed(self._published))
        self._wait_for_all(f"serve version {wanted}", lambda one: self._serves(one, wanted))

    def sampler_of(self, version: WeightVersion) -> PinnedSampler:
        """A sampler that only asks servers which serve `version`, or what came after it. Waits for
        the first of them, and raises as `wait_until_ready` does."""
        least = version.number
        self._wait(
            f"serve version {least}", lambda: any(self._serves(s, least) for s in self._servers)
        )
        return PinnedSampler(self, least)

    async def sample(
        self, tokens: np.ndarray, params: SamplingParams, *, oldest: int | None = None
    ) -> Completion:
        """tokens int [P] -> the completion, sampled by a server with version `oldest` or a later
        one (None: as last given to `publish`).

        A request that is cut is asked again, with the same seed. Raises `RequestError` if a server
        refuses it, `DriverError` if it was cut too often, `DeadlineError` if no server can take it,
        `WeightVersionError` if the weights behind the answer are not those that were published.
        """
        return await asyncio.wrap_future(self._submit(tokens, params, oldest))

    def sample_blocking(
        self, tokens: np.ndarray, params: SamplingParams, *, oldest: int | None = None
    ) -> Completion:
        """`sample` for code without an event loop."""
        future = self._submit(tokens, params, oldest)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def describe(self) -> str:
        """What each server does, in words."""
        return "; ".join(server.describe() for server in self._servers)

    def loading(self) -> set[int]:
        """The versions that servers read at this moment, as far as they say so in time."""
        asked = asyncio.run_coroutine_threadsafe(self._ask_loading(), self._loop)
        return asked.result()

    def _submit(self, tokens: np.ndarray, params: SamplingParams, oldest: int | None) -> Future:
        return asyncio.run_coroutine_threadsafe(self._sample(tokens, params, oldest), self._loop)

    def _wait_for_all(self, what: str, holds: Callable[[Watched], bool]) -> None:
        self._wait(what, lambda: all(holds(server) for server in self._servers))

    def _wait(self, what: str, holds: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(self._until(what, holds), self._loop).result()

    # In the thread.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _open(self) -> None:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        # Bounded by `room` of each server.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        self._servers = [Watched(RemoteServer(url, self._session)) for url in self._urls]
        self._watches = [self._loop.create_task(self._watch(server)) for server in self._servers]

    async def _close(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._session.close()

    def _tell(self) -> None:
        """Something has changed: everybody who waits shall look."""
        self._changed.set()
        self._changed = asyncio.Event()
        while self._waiters:
            self._wake_one()

    def _wake_one(self) -> None:
        """There is room for one request: not all of thousands need to look."""
        if self._waiters:
            waiter = next(iter(self._waiters))
            del self._waiters[waiter]
            if not waiter.done():
                waiter.set_result(None)

    async def _watch(self, watched: Watched) -> None:
        """Know what a server does, until one shows that it cannot be used."""
        while True:
            wanted, changed = self._wanted, self._changed
            try:
                told = await watched.server.weights(wanted, POLL_S)
                watched.check(told, self._needs)
                watched.check_run(told, self._wanted, self._published)
            except CutError as error:
                if watched.down(str(error)):
                    self._tell()
                await asyncio.sleep(AGAIN_S)
                continue
            except Exception as error:
                known = isinstance(error, JaxrlError)
                self._failure = error if known else DriverError(f"{watched.url}: {error!r}")
                self._tell()
                return
            if watched.up(told):
                self._tell()
            elif wanted is None or told.serving == wanted:
                await no_longer_than(POLL_S, changed)
            else:
                # While it loads or reads weights, the answer itself was waited for.
                await asyncio.sleep(AGAIN_S if told.state in ("draining", "failed") else 0.02)

    async def _ask_loading(self) -> set[int]:
        async def one(watched: Watched) -> int | None:
            try:
                async with asyncio.timeout(POLL_S):
                    return (await watched.server.weights(None, 0)).loading
            except (CutError, DriverError, TimeoutError):
                return None

        found = await asyncio.gather(*(one(watched) for watched in self._servers))
        return {number for number in found if number is not None}

    def _serves(self, watched: Watched, oldest: int) -> bool:
        """Whether it samples from a version of this run that is not too old."""
        serving = watched.serving
        if serving is None or serving.number < oldest:
            return False
        return self._published.get(serving.number) == serving.digest

    async def _until(self, what: str, holds: Callable[[], Any]) -> Any:
        """The first result of `holds` that is true; it is looked at after each change."""
        began = time.monotonic()
        while True:
            if self._failure is not None:
                raise type(self._failure)(str(self._failure)) from self._failure
            if found := holds():
                return found
            if time.monotonic() - began > self._wait_s:
                raise DeadlineError(
                    f"waited {self._wait_s:g} s for samplers that {what}: {self.describe()}"
                )
            waiter = self._loop.create_future()
            self._waiters[waiter] = None
            try:
                await asyncio.wait({waiter}, timeout=REST_S)
            finally:
                self._waiters.pop(waiter, None)

    def _free(self, oldest: int | None) -> Watched | None:
        """The server with the fewest requests of those that can take one more."""
        least = self._oldest if oldest is None else oldest
        now = time.monotonic()
        able = [
            watched
            for watched in self._servers
            if self._serves(watched, least)
            and watched.rests_until <= now
            and len(watched.calls) < watched.told.room
        ]
        return min(able, key=lambda watched: (len(watched.calls), watched.used), default=None)

    async def _sample(
        self, tokens: np.ndarray, params: SamplingParams, oldest: int | None
    ) -> Completion:
        cuts = 0
        while True:
            least = self._oldest if oldest is None else oldest
            what = f"serve version {least} or a later one and can take a request"
            watched = await self._until(what, lambda: self._free(oldest))
            try:
                completion, versions = await self._call(watched, tokens, params)
            except BusyError as error:
                watched.rests_until = time.monotonic() + REST_S
                _LOGGER.debug("sampler %s is busy: %s", watched.url, error)
            except CutError as error:
                cuts += 1
                if cuts > MAX_CUTS:
                    raise DriverError(
                        f"sampler {watched.url} and others cut one request {cuts} times; the last "
                        f"time: {error}"
                    ) from error
                if error.unreachable:
                    # The watch finds out, and says so once for all requests.
                    watched.doubted = True
                    self._tell()
                else:
                    _LOGGER.warning("sampler %s cut a request: %s", watched.url, error)
                await asyncio.sleep(REST_S)
            else:
                watched.prove(versions, self._published)
                self.tokens += len(completion.tokens)
                return self._with_text(completion)

    async def _call(
        self, watched: Watched, tokens: np.ndarray, params: SamplingParams
    ) -> tuple[Completion, list[WeightVersion]]:
        """One request to one server; the watch cuts it if the server is gone."""
        call = self._loop.create_task(watched.server.complete(tokens, params))
        self._turn += 1
        watched.used = self._turn
        watched.calls.add(call)
        # Of a call that is cancelled as it ends nobody asks for the error.
        call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait({call})
        finally:
            watched.calls.discard(call)
            call.cancel()
            self._wake_one()
        if call.cancelled():
            raise CutError(watched.trouble, unreachable=True)
        return call.result()

    def _with_text(self, completion: Completion) -> Completion:
        """With the text that the driver would give it."""
        if self.tokenizer is None:
            return completion
        tokens = completion.tokens.tolist()
        shown = tokens[:-1] if completion.finish_reason == "stop" else tokens
        return dataclasses.replace(completion, text=self.tokenizer.decode(shown))


@dataclasses.dataclass(frozen=True)
class PinnedSampler:
    """`RemoteSampler` at servers that have version `oldest` or a later one."""

    remote: RemoteSampler
    oldest: int

    async def sample(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        """As `RemoteSampler.sample`."""
        return await self.remote.sample(tokens, params, oldest=self.oldest)

    def sample_blocking(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        """As `RemoteSampler.sample_blocking`."""
        return self.remote.sample_blocking(tokens, params, oldest=self.oldest)
