"""What the front ends serve: one driver, its text side, and the state that both report."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from jaxrl.errors import DriverError, NotReadyError
from jaxrl.serving.errors import status_of
from jaxrl.serving.generation import Generate, Piece, generate
from jaxrl.types import WeightVersion

if TYPE_CHECKING:
    from jaxrl.data.chat import ChatPrompts
    from jaxrl.data.tokenizers import Tokenizer
    from jaxrl.inference.driver import Driver

State = Literal["loading", "ready", "draining", "failed"]

KEPT_VERSIONS = 1024
"""How many versions back the digest is known."""


class Meter(Protocol):
    """Who wants to know what is generated; called in the event loop."""

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """`count` tokens came `seconds` after the request (`first`) or after those before."""

    def finished(self, outcome: str) -> None:
        """A request has ended: "ok", "cancelled", or the code of its error."""


class Follows(Protocol):
    """Who takes up the versions of a run as they are published; may be asked from any thread."""

    loading: int | None
    """The version that is being read."""
    problem: str
    """Why the newest version is not served; "" if nothing is wrong."""

    def look(self) -> int:
        """Look for a new version now; returns at once, with a ticket for `newest`."""

    def newest(self, ticket: int) -> WeightVersion | None:
        """The newest version of the run, from a look that began after `look` gave the ticket."""


@dataclasses.dataclass(eq=False)
class Backend:
    """A model as it is served. Without a driver it is loading; `open` makes it ready.

    `name` is what clients call the model; `chat` is how it is asked in a chat, None where the model
    has no template; `timeout_s` bounds every request (None: no limit). If it `follows` a run,
    `follower` takes up that run's versions, once there is one. `model_meaning` is what the numbers
    of the weights mean, field by field.
    """

    name: str
    timeout_s: float | None = None
    max_waiting: int | None = None
    meter: Meter | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    driver: Driver | None = None
    tokenizer: Tokenizer | None = None
    chat: ChatPrompts | None = None
    stop_ids: tuple[int, ...] = ()
    draining: bool = False
    reloading: bool = False
    follows: bool = False
    follower: Follows | None = None
    model_meaning: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._versions: collections.OrderedDict[int, WeightVersion] = collections.OrderedDict()
        self._lock = threading.Lock()

    def open(
        self,
        driver: Driver,
        *,
        chat: ChatPrompts | None = None,
        stop_ids: tuple[int, ...] | None = None,
    ) -> None:
        """Serve this started driver, which has a tokenizer; sampling ends at `stop_ids` (None:
        those of the chat, or of the tokenizer)."""
        self.tokenizer, self.chat = driver.tokenizer, chat
        if stop_ids is None:
            stop_ids = self.tokenizer.stop_ids if chat is None else chat.template.stop_ids
        self.stop_ids = stop_ids
        self._remember(driver.version)
        self.driver = driver

    @property
    def state(self) -> State:
        """What the server can do at this moment."""
        if self.driver is not None and self.driver.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        return "loading" if self.driver is None or self.reloading else "ready"

    def ready(self) -> Driver:
        """The driver. Raises `NotReadyError`, or `DriverError` if the engine has failed."""
        state = self.state
        if state == "failed":
            raise DriverError(str(self.driver.failure)) from self.driver.failure
        if state == "draining":
            raise NotReadyError("the server is shutting down: it takes no new requests")
        if state == "loading":
            raise NotReadyError(f"the model {self.name} is still loading: try again later")
        return self.driver

    async def generate(self, request: Generate) -> AsyncIterator[Piece]:
        """As `jaxrl.serving.generation.generate`, for both front ends: with the server's own time
        limit where the request has none, and measured. Raises also what `ready` raises."""
        outcome, watch = "cancelled", _Watch(self.meter)
        try:
            driver = self.ready()
            if request.timeout is None:
                request = dataclasses.replace(request, timeout=self.timeout_s)
            async with contextlib.aclosing(generate(driver, request)) as pieces:
                async for piece in pieces:
                    watch.see(piece)
                    if piece.finish_reason is not None:
                        outcome = "ok"
                    yield piece
        except DriverError as error:
            told = error
            if driver.failure is None and self.draining:
                told = NotReadyError("the server shut down before the completion had ended")
            elif driver.failure is None and (self.reloading or driver is not self.driver):
                told = NotReadyError("the run has taken back the weights of this completion")
            outcome = status_of(told).code
            raise told from error
        except Exception as error:
            outcome = status_of(error).code
            raise
        finally:
            if self.meter is not None:
                self.meter.finished(outcome)

    def set_weights(self, params: Any, version: WeightVersion) -> None:
        """As `Driver.set_weights`, which blocks; from then on clients are told the digest."""
        with self._lock:
            before = self._versions.get(version.number)
        # Before the driver: the first token of the version may come while this still waits.
        self._remember(version)
        try:
            self.driver.set_weights(params, version)
        except BaseException:
            self._remember(before or WeightVersion(version.number, ""))
            raise

    def reopen(self, make: Callable[[], Driver]) -> None:
        """Serve the started driver that `make` gives, in place of the present one; blocks.

        Requests of the old one end with `NotReadyError`: a number of theirs may mean other weights
        from now on. The server is loading until the new one is there, also if `make` raises.
        """
        self.reloading = True
        self.driver.stop()
        driver = make()
        with self._lock:
            self._versions.clear()
        self._remember(driver.version)
        self.driver, self.reloading = driver, False

    def version(self, number: int) -> WeightVersion:
        """The version of a token. The digest is "" if it was never told, or long ago."""
        with self._lock:
            known = self._versions.get(number)
        if known is None and self.driver is not None and self.driver.version.number == number:
            known = self.driver.version
        return known or WeightVersion(number, "")

    def _remember(self, version: WeightVersion) -> None:
        with self._lock:
            self._versions[version.number] = version
            while len(self._versions) > KEPT_VERSIONS:
                self._versions.popitem(last=False)


class _Watch:
    """Tells a meter when the tokens of one request came."""

    def __init__(self, meter: Meter | None):
        self._meter, self._last, self._first = meter, time.monotonic(), True

    def see(self, piece: Piece) -> None:
        """One more piece."""
        if self._meter is None or not piece.tokens:
            return
        now = time.monotonic()
        self._meter.tokens(len(piece.tokens), now - self._last, first=self._first)
        self._last, self._first = now, False
