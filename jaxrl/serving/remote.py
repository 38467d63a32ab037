"""One server that samples for a trainer, as its client sees it: what is asked, what is believed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import numpy as np

from jaxrl.errors import AuthenticationError, DriverError, RequestError
from jaxrl.types import Completion, SamplingParams, WeightVersion

CONNECT_S = 5.0
"""Seconds that a server may take to accept a connection."""

ANSWER_S = 15.0
"""Seconds beyond the wait that was asked for in which a server must say what it serves."""


_MOST_FLOAT = float(np.finfo(np.float32).max)


class CutError(Exception):
    """The connection broke (then it may be `unreachable`), or the server failed: the same request
    may be answered later, or elsewhere."""

    def __init__(self, message: str, *, unreachable: bool = False):
        super().__init__(message)
        self.unreachable = unreachable


class BusyError(Exception):
    """The server takes no request now: its queue is full, or it loads other weights."""


@dataclasses.dataclass(frozen=True)
class Told:
    """What a server says of its weights. `serving` and what follows it are None, 0 and empty while
    it loads for the first time; `newest` is the newest version of its run, if it has looked."""

    state: str
    serving: WeightVersion | None = None
    newest: WeightVersion | None = None
    loading: int | None = None
    problem: str = ""
    follows: bool = False
    max_length: int = 0
    room: int = 1
    logprobs: str = ""
    model_meaning: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class RemoteServer:
    """A server at `url`, asked through `session`; used in one event loop.

    Errors name the url. Raises everywhere `CutError`; `AuthenticationError` for a missing or wrong
    token, and `DriverError` for an answer that makes no sense.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession):
        self.url = url
        self._session = session

    async def weights(self, wanted: WeightVersion | None, wait_s: float) -> Told:
        """What it says of its weights; it answers after `wait_s` seconds, or once it serves
        `wanted` or can say that it will not."""
        query = {}
        if wanted is not None:
            query = {"number": wanted.number, "digest": wanted.digest, "wait_s": wait_s}
        limit = aiohttp.ClientTimeout(total=wait_s + ANSWER_S, sock_connect=CONNECT_S)
        async with self._asked("GET", "/v1/weights", params=query, timeout=limit) as answer:
            if answer.status == 404:
                raise DriverError(f"{self.url} has no /v1/weights: it is no `jaxrl serve`")
            body = await self._body(answer)
        with self._understanding():
            return _told(body)

    async def complete(
        self, tokens: np.ndarray, params: SamplingParams
    ) -> tuple[Completion, list[WeightVersion]]:
        """tokens int [P] -> the completion, without text, and the versions that it says are behind
        it. Raises also `BusyError`, and `RequestError` for what the server refuses."""
        request = _request(tokens, params)
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        asked = self._asked("POST", "/v1/completions", json=request, timeout=limit)
        async with asked as answer:
            if answer.status in (429, 503):
                raise BusyError(await self._reason(answer))
            if 400 <= answer.status < 500 and answer.status not in (401, 408):
                raise RequestError(f"{self.url} refuses: {await self._reason(answer)}")
            body = await self._body(answer)
        with self._understanding():
            return _completion(body, params)

    @contextlib.asynccontextmanager
    async def _asked(
        self, method: str, path: str, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response, whatever its status."""
        try:
            # A token must not follow a redirection to somebody else.
            async with self._session.request(
                method, self.url + path, allow_redirects=False, **options
            ) as answer:
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # Of aiohttp's own errors the one of the system within says more.
            cause = getattr(error, "os_error", error)
            text = f"{type(cause).__name__}: {cause}".rstrip(": ")
            raise CutError(text, unreachable=True) from error

    async def _body(self, answer: aiohttp.ClientResponse) -> Any:
        if answer.status == 401:
            raise AuthenticationError(f"{self.url}: {await self._reason(answer)}")
        if answer.status != 200:
            raise CutError(f"status {answer.status}: {await self._reason(answer)}")
        raw = await answer.read()
        with self._understanding():
            return json.loads(raw)

    async def _reason(self, answer: aiohttp.ClientResponse) -> str:
        """What an error says, on one short line."""
        raw = await answer.content.read(4096)
        try:
            text = json.loads(raw)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = raw.decode("utf-8", "replace")
        return " ".join(str(text).split())[:300] or f"status {answer.status}"

    @contextlib.contextmanager
    def _understanding(self):
        try:
            yield
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise DriverError(
                f"{self.url} gave an answer that makes no sense: {type(error).__name__}: {error}"
            ) from error


def _request(tokens: np.ndarray, params: SamplingParams) -> dict[str, Any]:
    if params.top_logprobs:
        # Answers name alternatives by their texts, which do not tell ids.
        raise RequestError(
            f"top_logprobs={params.top_logprobs} must be 0 where rollout.samplers is set"
        )
    return {
        "prompt": np.asarray(tokens).tolist(),
        "max_tokens": int(params.max_tokens),
        "temperature": float(params.temperature),
        "top_k": int(params.top_k),
        "top_p": float(params.top_p),
        "seed": int(params.seed),
        "ignore_eos": True,
        "stop_token_ids": [int(token) for token in params.stop_tokens],
        "logprobs": 0,
        "return_token_ids": True,
    }


def _told(body: Any) -> Told:
    if body["state"] == "loading" and "serving" not in body:
        return Told("loading")
    newest, loading = body["newest"], body["loading"]
    if loading is not None:
        _whole(loading, "loading")
    if type(body["follows"]) is not bool:
        raise ValueError(f"follows={body['follows']!r} must be true or false")
    return Told(
        state=str(body["state"]),
        serving=_version(body["serving"]),
        newest=None if newest is None else _version(newest),
        loading=loading,
        problem=str(body["problem"]),
        follows=body["follows"],
        max_length=_whole(body["max_length"], "max_length", 1),
        room=_whole(body["room"], "room", 1),
        logprobs=str(body["logprobs"]),
        model_meaning=dict(body["model_meaning"]),
    )


def _version(record: Any) -> WeightVersion:
    number, digest = _whole(record["number"], "number"), record["digest"]
    if not isinstance(digest, str):
        raise ValueError(f"digest={digest!r:.100} must be text")
    return WeightVersion(number, digest)


def _whole(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r:.100} must be a whole number of at least {least}")
    return value


def _completion(body: Any, params: SamplingParams) -> tuple[Completion, list[WeightVersion]]:
    (choice,) = body["choices"]
    tokens, reason = choice["token_ids"], choice["finish_reason"]
    logprobs, numbers = choice["logprobs"]["token_logprobs"], choice["logprobs"]["versions"]
    if not 1 <= len(tokens) <= params.max_tokens:
        raise ValueError(f"{len(tokens)} tokens, asked for 1 to {params.max_tokens}")
    if not len(tokens) == len(logprobs) == len(numbers):
        sizes = f"{len(logprobs)} log-probabilities and {len(numbers)} versions"
        raise ValueError(f"{len(tokens)} tokens with {sizes}")
    if not all(type(value) is int and 0 <= value < 2**31 for value in (*tokens, *numbers)):
        raise ValueError("tokens and versions must be whole numbers of 31 bits")
    if not all(type(value) in (int, float) and abs(value) <= _MOST_FLOAT for value in logprobs):
        raise ValueError("log-probabilities must be finite numbers of 32 bits")
    if reason not in ("stop", "length") or (reason == "stop") != (tokens[-1] in params.stop_tokens):
        raise ValueError(f"finish_reason {reason!r} after token {tokens[-1]}")
    versions = [_version(record) for record in body["weight_versions"]]
    if {version.number for version in versions} != set(numbers):
        raise ValueError("weight_versions must be those of the tokens")
    completion = Completion(
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        np.array(numbers, np.int32),
        reason,
    )
    return completion, versions


async def no_longer_than(seconds: float, event: asyncio.Event) -> None:
    """Wait for the event, at most so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
