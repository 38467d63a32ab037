"""One request to the driver, answered as text: whole characters, cut exactly at stop strings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxrl.data.streaming import TextDecoder
from jaxrl.errors import DriverError, RequestError
from jaxrl.types import SamplingParams

if TYPE_CHECKING:
    from jaxrl.inference.driver import Driver
    from jaxrl.inference.streaming import Chunk

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1024
"""The most stop strings of a request, and the most characters of one."""


@dataclasses.dataclass(frozen=True)
class Generate:
    """What to generate: `tokens` int [P] is the prompt, `stop` are texts that end the completion,
    `timeout` in seconds counts from the arrival (None: no limit)."""

    tokens: np.ndarray
    params: SamplingParams
    stop: tuple[str, ...] = ()
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_stop(self.stop)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What has come since the piece before it.

    `text` is what has become certain: all texts together are the completion's, without its stop
    token or stop string. `tokens`, `logprobs`, `versions` and `top` describe what was sampled,
    token by token, up to and including the token that ended the completion; text may come a piece
    later than its tokens. `top[i]` are the alternatives of token i, (id, log-probability), most
    likely first. `finish_reason` is set in the last piece, and only there.
    """

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None


def check_stop(stop: Sequence[str]) -> None:
    """Raise `RequestError` for stop strings that cannot be looked for."""
    if len(stop) > MAX_STOPS:
        raise RequestError(f"{len(stop)} stop strings: at most {MAX_STOPS} are allowed")
    for text in stop:
        if not isinstance(text, str):
            raise RequestError(f"stop string {text!r} must be a text, not {type(text).__name__}")
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            rule = f"must have 1 to {MAX_STOP_CHARACTERS} characters"
            raise RequestError(f"stop string {text[:20]!r} of {len(text)} characters {rule}")


async def generate(driver: Driver, request: Generate) -> AsyncIterator[Piece]:
    """The completion in pieces, as the driver gives them; `driver` must have a tokenizer.

    The completion ends with the token that completes a stop string, whatever else was decoded
    together with it, and the driver's slot is then free. Closing this generator, or cancelling who
    waits for it, cancels the request. Raises what `Driver.stream` raises, at once for a request
    that is refused, and `DriverError` for log-probabilities that are no finite numbers.
    """
    text = _Text(driver.tokenizer, request)
    with driver.stream(request.tokens, request.params, timeout=request.timeout) as stream:
        async for chunk in stream:
            _check_finite(chunk)
            count, piece = text.take(chunk.tokens.tolist())
            yield _piece(chunk, count, piece, "stop" if text.stopped else None)
            if text.stopped:
                return
        # The stream has ended: its completion is there, nothing is waited for.
        reason = stream.completion.finish_reason
    rest = text.finish()
    yield Piece(rest, finish_reason="stop" if text.stopped else reason)


def _check_finite(chunk: Chunk) -> None:
    finite = np.isfinite(chunk.logprobs)
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise DriverError(
            f"weights of version {chunk.versions[bad[0]]} gave log-probability "
            f"{chunk.logprobs[bad[0]]}: it must be finite"
        )


def _piece(chunk: Chunk, count: int, text: str, reason: Literal["stop"] | None) -> Piece:
    """The first `count` tokens of a chunk as a piece."""
    top: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    if chunk.top_tokens is not None:
        rows = zip(chunk.top_tokens.tolist(), chunk.top_logprobs.tolist(), strict=True)
        # What top-k and top-p leave out has no probability, and -inf is no number in JSON.
        top = [[(i, x) for i, x in zip(*row, strict=True) if math.isfinite(x)] for row in rows]
    return Piece(
        text,
        chunk.tokens[:count].tolist(),
        chunk.logprobs[:count].tolist(),
        chunk.versions[:count].tolist(),
        top[:count],
        reason,
    )


class _Text:
    """The text of one completion, token by token."""

    def __init__(self, tokenizer: Any, request: Generate):
        self._decoder = TextDecoder(tokenizer)
        self._stop_tokens = frozenset(request.params.stop_tokens)
        self._search = StopSearch(request.stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._search.found

    def take(self, tokens: list[int]) -> tuple[int, str]:
        """More tokens -> (how many of them belong to the completion, the text that is certain)."""
        # A stop token ends the completion and is not part of its text.
        if not self._search.stops:
            shown = [token for token in tokens if token not in self._stop_tokens]
            return len(tokens), self._decoder.push(shown)
        text = ""
        for count, token in enumerate(tokens, start=1):
            if token not in self._stop_tokens:
                text += self._search.push(self._decoder.push([token]))
            if self.stopped:
                return count, text
        return len(tokens), text

    def finish(self) -> str:
        """The text that was held back, when no token follows."""
        return self._search.push(self._decoder.finish()) + self._search.finish()


class StopSearch:
    """Text in bits, out again up to the first of `stops`: that which is complete first; of those
    complete with the same character, the longest. `found` says whether one has come.

    How the text is cut into bits makes no difference. Held back is only what may begin a stop.

    >>> search = StopSearch(["END"])
    >>> search.push("the E"), search.push("N"), search.push("EN"), search.push("D."), search.found
    ('the ', '', 'EN', '', True)
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.found = False
        self._held = ""

    def push(self, text: str) -> str:
        """The text that no stop can take away any more; "" once a stop was found."""
        if self.found:
            return ""
        held = self._held + text
        cut = self._cut(held)
        if cut is not None:
            self.found, self._held = True, ""
            return held[:cut]
        keep = self._beginning(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str) -> int | None:
        """Where the first stop begins."""
        starts = ((text.find(stop), stop) for stop in self.stops)
        found = [(start + len(stop), start) for start, stop in starts if start >= 0]
        return min(found)[1] if found else None

    def _beginning(self, text: str) -> int:
        """Characters of the longest end of `text` that begins a stop."""
        longest = min(len(text), max(map(len, self.stops), default=1) - 1)
        ends = (length for length in range(longest, 0, -1))
        return next((n for n in ends if any(s.startswith(text[-n:]) for s in self.stops)), 0)
