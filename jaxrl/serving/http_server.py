"""The HTTP front end: OpenAI's API, health, metrics and a status page, over one backend."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from jaxrl.errors import ConfigError, DriverError
from jaxrl.observe.logger import get_logger
from jaxrl.serving import http_replies as replies
from jaxrl.serving.auth import check_header
from jaxrl.serving.backend import Backend
from jaxrl.serving.errors import ModelNotFoundError, status_of
from jaxrl.serving.generation import Piece
from jaxrl.serving.merging import merged
from jaxrl.serving.metrics import Metrics
from jaxrl.serving.openai_answers import Answer, ChatAnswer, CompletionAnswer
from jaxrl.serving.openai_requests import Ask, read_chat, read_completion
from jaxrl.serving.status_page import page, status
from jaxrl.serving.token_texts import TokenTexts
from jaxrl.serving.weights_reply import weights_reply

MAX_BODY = 4 << 20
"""Bytes of the largest request."""

BODY_S, WRITE_S, LINGER_S = 30.0, 60.0, 2.0
"""Seconds that a client may take to send its request, and to take what is written; and seconds
that connections have to end when the server stops."""

_LOGGER = get_logger("serving")


def _no_fault_of_clients(record: logging.LogRecord) -> bool:
    """Bytes that are no HTTP have been answered; quoted in a log, they could show a token."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_HTTP_LOGGER = get_logger("serving.http")
_HTTP_LOGGER.addFilter(_no_fault_of_clients)
_PAGES = ("/", "/status", "/metrics")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """A server that listens; `port` is where."""

    def __init__(self, runner: web.AppRunner):
        self._runner = runner
        self.port: int = runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port; answers that are under way have `LINGER_S` to end."""
        await self._runner.cleanup()


async def start_http(
    backend: Backend,
    host: str,
    port: int,
    token: str | None = None,
    metrics: Metrics | None = None,
) -> HttpServer:
    """Listen on `host` and `port` (0: a free one). `metrics` None makes new ones.

    Raises `ConfigError` if it cannot listen there.
    """
    if metrics is None:
        metrics = Metrics()
        backend.meter = metrics
    metrics.watch(backend)
    runner = web.AppRunner(
        _Routes(backend, token, metrics).application(),
        access_log=None,
        logger=_HTTP_LOGGER,
        # Whoever leaves cancels the handler, which frees the slot.
        handler_cancellation=True,
        shutdown_timeout=LINGER_S,
        # A few bytes can decompress to a flood.
        auto_decompress=False,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except (OSError, OverflowError, UnicodeError) as error:  # the last: a name that is none
        await runner.cleanup()
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from None
    return HttpServer(runner)


class _Routes:
    """What is answered where."""

    def __init__(self, backend: Backend, token: str | None, metrics: Metrics):
        self._backend, self._token, self._metrics = backend, token, metrics
        self._texts: TokenTexts | None = None

    def application(self) -> web.Application:
        """The routes, behind the token and with errors in OpenAI's form."""
        application = web.Application(middlewares=[self._around], client_max_size=MAX_BODY)
        application.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.get("/v1/weights", self._weights),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.get("/status", self._status),
                web.get("/", self._page),
            ]
        )
        return application

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The token before, errors and counts after."""
        resource = request.match_info.route.resource
        endpoint = "unknown" if resource is None else resource.canonical
        try:
            if endpoint != "/health":
                given = request.headers.get("Authorization")
                check_header(given, self._token, basic=endpoint in _PAGES)
            response = await handler(request)
        except asyncio.CancelledError:
            self._metrics.responded(endpoint, replies.CLIENT_LEFT)
            raise
        except web.HTTPException as error:
            response = replies.http_error(error)
        except Exception as error:
            self._log(endpoint, error)
            response = replies.failure(error, basic=endpoint in _PAGES)
        self._metrics.responded(endpoint, response.status)
        return response

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, read_completion, CompletionAnswer)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, read_chat, ChatAnswer)

    async def _generate(
        self, request: web.Request, read: Callable[[bytes, Backend], Ask], kind: type[Answer]
    ) -> web.StreamResponse:
        self._backend.ready()
        raw = await _body(request)
        # In a thread: long texts take a while to encode, and others shall not wait for that.
        ask = await asyncio.to_thread(read, raw, self._backend)
        self._texts = self._texts or TokenTexts(self._backend.tokenizer)
        answer = kind(self._backend, ask, self._texts)
        streams = [self._backend.generate(generation) for generation in ask.generations()]
        async with contextlib.aclosing(merged(streams)) as pieces:
            if ask.stream:
                return await self._stream(request, pieces, answer)
            async for index, piece in pieces:
                answer.add(index, piece)
        return replies.json_reply(answer.whole())

    async def _stream(
        self, request: web.Request, pieces: AsyncIterator[tuple[int, Piece]], answer: Answer
    ) -> web.StreamResponse:
        """Server-sent events, one a piece. What fails before the first piece has its own status;
        later the status is sent already, and the error is the last event."""
        index, piece = await anext(pieces)
        response = web.StreamResponse(headers=replies.EVENT_HEADERS)
        try:
            with _leaving():
                await response.prepare(request)
            await _write(response, answer.take(index, piece))
            async for index, piece in pieces:
                await _write(response, answer.take(index, piece))
            await _write(response, answer.usage_chunk())
            await _write(response, replies.DONE)
        except _ClientGoneError:
            # What is left in the connection would wait for ever.
            if request.transport is not None:
                request.transport.abort()
        except Exception as error:
            self._log(request.path, error)
            with contextlib.suppress(_ClientGoneError):
                await _write(response, replies.error_object(error))
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._backend.ready()
        return replies.json_reply({"object": "list", "data": [replies.model(self._backend)]})

    async def _model(self, request: web.Request) -> web.Response:
        self._backend.ready()
        name = request.match_info["model"]
        if name != self._backend.name:
            raise ModelNotFoundError(f"there is no model {name[:80]!r} here", "model")
        return replies.json_reply(replies.model(self._backend))

    async def _weights(self, request: web.Request) -> web.Response:
        return replies.json_reply(await weights_reply(self._backend, request.query))

    async def _health(self, request: web.Request) -> web.Response:
        state = self._backend.state
        return replies.json_reply({"status": state}, status=200 if state == "ready" else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return replies.metrics_reply(self._metrics.text())

    async def _status(self, request: web.Request) -> web.Response:
        return replies.json_reply(status(self._backend, self._metrics))

    async def _page(self, request: web.Request) -> web.Response:
        text, headers = page()
        return web.Response(text=text, content_type="text/html", headers=headers)

    def _log(self, path: str, error: Exception) -> None:
        """Errors that are ours; those of clients are answered, and that is all. Once the driver has
        failed everybody gets its error, and whoever runs the server reports it."""
        driver = self._backend.driver
        if status_of(error).http != 500 or (driver is not None and driver.failure is not None):
            return
        _LOGGER.error("%s: %s", path, error, exc_info=not isinstance(error, DriverError))


class _ClientGoneError(Exception):
    """Nobody takes what is written."""


async def _body(request: web.Request) -> bytes:
    """The body, which must be JSON: no web page of others can send that without asking first."""
    kind, encoding = request.content_type, request.headers.get("Content-Encoding")
    if kind != "application/json":
        raise web.HTTPUnsupportedMediaType(
            reason=f"Content-Type {kind[:80]!r} must be application/json"
        )
    if encoding is not None:
        raise web.HTTPUnsupportedMediaType(
            reason=f"Content-Encoding {encoding[:80]!r}: the body must not be compressed"
        )
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            reason=f"the body did not come within {BODY_S:.0f} s"
        ) from None


async def _write(response: web.StreamResponse, event: replies.Event) -> None:
    """Send an event, if there is one. Raises `_ClientGoneError`."""
    if event is None:
        return
    with _leaving():
        async with asyncio.timeout(WRITE_S):
            await response.write(replies.event_bytes(event))


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Raises `_ClientGoneError` where nobody takes what is sent."""
    try:
        yield
    except (ConnectionError, TimeoutError) as error:
        raise _ClientGoneError from error
