"""The gRPC front end: JetStream's protocol, with the standard health and reflection services."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from jaxrl.errors import AuthenticationError, ConfigError, JaxrlError
from jaxrl.observe.logger import get_logger
from jaxrl.serving import protocol
from jaxrl.serving.auth import check_header
from jaxrl.serving.backend import Backend
from jaxrl.serving.errors import RETRY_AFTER_S, message_of, status_of
from jaxrl.serving.grpc_decode import decode

log = get_logger("serving.grpc")

HEALTH = "grpc.health.v1.Health"
OPEN_METHODS = frozenset(
    {f"/{HEALTH}/Check", f"/{HEALTH}/Watch", f"/{protocol.SERVICE}/HealthCheck"}
)
"""What may be called without the token: whoever balances load has none."""

MAX_CALLS = 1 << 20
"""Calls that may wait to be taken up. gRPC's own limit cancels some of a few thousand that come at
the same time; the bound that counts is the driver's, which answers with a reason."""

OPTIONS = (
    ("grpc.server.max_pending_requests", MAX_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
    # Two servers on one port would each get some of the calls; the second one shall fail instead.
    ("grpc.so_reuseport", 0),
    # Clients whose machine vanished are found out, and their slots are free again.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Clients may ask as often, instead of being cut off for it.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

FOLLOW_S = 0.1
"""How often those who watch the health are told of a change, in seconds."""


class GrpcServer:
    """A running server: its `port`, and `stop`."""

    def __init__(self, server: grpc.aio.Server, port: int, health_service: Health):
        self._server = server
        self._health = health_service
        self.port = port

    async def stop(self, grace: float | None = None) -> None:
        """Take no new calls, give those that run `grace` seconds, and end what is left then."""
        await self._health.close()
        await self._server.stop(grace)


async def start_grpc(backend: Backend, host: str, port: int, token: str | None) -> GrpcServer:
    """Serve `backend` on `host`:`port` (0: any free port) in this event loop.

    The server answers at once, also while the model loads: health says NOT_SERVING until it is
    ready. With `token`, every call but those for health must bring it in the metadata
    `authorization` as `Bearer TOKEN`. Raises `ConfigError` if the port cannot be had.
    """
    guards = [] if token is None else [TokenGuard(token)]
    server = grpc.aio.server(options=OPTIONS, interceptors=guards)
    server.add_generic_rpc_handlers((_orchestrator(backend),))
    health_service = Health(backend)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    names = (protocol.SERVICE, HEALTH, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=_described())
    bound = _bind(server, host, port)
    await health_service.refresh()
    await server.start()
    health_service.follow()
    return GrpcServer(server, bound, health_service)


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"gRPC cannot listen on {address}: {error}") from None


def _described() -> Any:
    """The pool of what reflection tells: the protocol and the standard services."""
    for module in (health_pb2, reflection_pb2):
        protocol.POOL.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    return protocol.POOL


def _orchestrator(backend: Backend) -> grpc.GenericRpcHandler:
    """The handlers of JetStream's service. Requests arrive as bytes: see `parse_request`."""

    async def decode_call(data: bytes, context: grpc.aio.ServicerContext) -> None:
        async def answer() -> None:
            request = protocol.parse_request(data)
            responses = decode(backend, request, context.time_remaining())
            # Written here and not yielded: a call that is cancelled while it writes must close the
            # generator at once, and with it free the slots.
            async with contextlib.aclosing(responses):
                async for response in responses:
                    await context.write(response)

        await answered(answer, context)

    async def health_call(data: bytes, context: grpc.aio.ServicerContext) -> Message:
        return protocol.HealthCheckResponse(is_live=backend.state == "ready")

    handlers = {
        "Decode": grpc.unary_stream_rpc_method_handler(
            decode_call, response_serializer=_serialized
        ),
        "HealthCheck": grpc.unary_unary_rpc_method_handler(
            health_call, response_serializer=_serialized
        ),
    }
    return grpc.method_handlers_generic_handler(protocol.SERVICE, handlers)


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


async def answered(
    answer: Callable[[], Awaitable[None]], context: grpc.aio.ServicerContext
) -> None:
    """Run `answer`; an error of it ends the call with its status in gRPC."""
    try:
        await answer()
        return
    except Exception as error:
        failure = error
    status = status_of(failure)
    if not isinstance(failure, JaxrlError):
        log.error("a call failed", exc_info=failure)
    # Clients with a retry policy heed this.
    retry = (("grpc-retry-pushback-ms", str(RETRY_AFTER_S * 1000)),) if status.passes else ()
    await context.abort(getattr(grpc.StatusCode, status.grpc), message_of(failure), retry)


class TokenGuard(grpc.aio.ServerInterceptor):
    """Lets only calls through that carry the token, except those of `OPEN_METHODS`."""

    def __init__(self, token: str):
        self._token = token

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """The method's own handler, or one that refuses the call."""
        handler = await continuation(details)
        if handler is None or details.method in OPEN_METHODS:
            return handler
        given = [value for key, value in details.invocation_metadata if key == "authorization"]
        try:
            check_header(given[0] if len(given) == 1 else None, self._token)
        except AuthenticationError as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: AuthenticationError) -> Any:
    """A handler of the same kind that ends every call with this error."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(getattr(grpc.StatusCode, status_of(error).grpc), message_of(error))

    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    return handler._replace(**{kind: refuse for kind in kinds if getattr(handler, kind)})


class Health(health.aio.HealthServicer):
    """The standard health service: SERVING exactly while the backend is ready."""

    def __init__(self, backend: Backend):
        super().__init__()
        self._backend = backend
        self._task: asyncio.Task | None = None

    async def Check(self, request: Message, context: grpc.aio.ServicerContext) -> Message:
        """The state of this moment."""
        await self.refresh()
        return await super().Check(request, context)

    async def refresh(self) -> None:
        """Look at the backend, and tell those who watch."""
        ready = self._backend.state == "ready"
        kinds = health_pb2.HealthCheckResponse
        for name in ("", protocol.SERVICE):
            await self.set(name, kinds.SERVING if ready else kinds.NOT_SERVING)

    def follow(self) -> None:
        """Refresh from time to time until `close`."""
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(FOLLOW_S)

    async def close(self) -> None:
        """NOT_SERVING from now on."""
        if self._task is not None:
            self._task.cancel()
        await self.enter_graceful_shutdown()
