"""`jaxrl serve`: published weights, or those of a run, over HTTP and gRPC.

The ports are open before anything heavy is imported, so that health answers while the model loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.cli import output
from jaxrl.cli.options import ServeOptions
from jaxrl.errors import ConfigError, DeadlineError
from jaxrl.observe.logger import get_logger, setup_logging
from jaxrl.serving.auth import load_token

if TYPE_CHECKING:
    from jaxrl.cli.served import Served
    from jaxrl.inference.driver import Driver
    from jaxrl.serving.backend import Backend

_LOGGER = get_logger("serving")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
LINGER_S = 2.0
"""Seconds that answers have to reach their clients once the driver has ended."""


def run(args: Any) -> int:
    """Serve until a signal comes; returns the exit code.

    Raises `ConfigError` for what is missing or taken, and the driver's error when it has failed.
    """
    options: ServeOptions = args.options
    _check_packages(options)
    setup_logging(args.config.observe.log_level)
    token = load_token(options.token_file)
    if token is None and options.host not in _LOOPBACK:
        _LOGGER.warning("--host=%s without a token: whoever reaches it may ask", options.host)
    loaded = asyncio.run(_serve(args, token))
    if not loaded:
        # The thread that loads cannot be stopped, and an interpreter that ends under it may crash.
        os._exit(0)
    return 0


def _check_packages(options: ServeOptions) -> None:
    needed = {"aiohttp", "prometheus_client"} if options.http_port >= 0 else set()
    needed |= {"grpc", "google.protobuf"} if options.grpc_port >= 0 else set()
    for package in sorted(needed):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(f"jaxrl serve needs {package}: pip install 'jaxrl[serve]'")


async def _serve(args: Any, token: str | None) -> bool:
    """Everything from the first port to the last; False if it was stopped while it still loaded."""
    from jaxrl.serving.backend import Backend

    options: ServeOptions = args.options
    backend = Backend(
        _model_name(options), timeout_s=options.timeout_s, max_waiting=options.max_waiting
    )
    backend.follows = options.follow
    stopping = _watch_signals()
    async with _listening(backend, options, token) as addresses:
        for address in addresses:
            _say(f"listening on {address}, loading {backend.name}")
        loading = _in_thread(lambda: _load(args, backend))
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            _say("stopped while loading")
            return False
        async with _driving(args, backend, loading.result()) as ended:
            for address in addresses:
                _say(f"ready: {backend.name} {backend.driver.version} on {address}")
            await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await _drain(backend, options.grace_s)
    if backend.driver.failure is not None:
        raise backend.driver.failure
    return True


def _model_name(options: ServeOptions) -> str:
    path = Path(options.run or options.weights).resolve()
    return options.model_name or path.name.removesuffix(".gguf")


def _load(args: Any, backend: Backend) -> Served:
    """The model, which `backend` serves from then on."""
    from jaxrl.cli.served import load_served

    served = load_served(args)
    backend.model_meaning = served.parts.model_meaning
    backend.open(served.driver, chat=served.parts.chat, stop_ids=served.parts.stop_ids)
    return served


@contextlib.asynccontextmanager
async def _listening(
    backend: Backend, options: ServeOptions, token: str | None
) -> AsyncIterator[list[str]]:
    """The addresses of the servers, which stop in the end."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    addresses = []
    async with contextlib.AsyncExitStack() as stack:
        if options.http_port >= 0:
            from jaxrl.serving.http_server import start_http

            http = await start_http(backend, options.host, options.http_port, token)
            stack.push_async_callback(http.stop)
            addresses.append(f"http://{host}:{http.port}")
        if options.grpc_port >= 0:
            from jaxrl.serving.grpc_server import start_grpc

            grpc = await start_grpc(backend, options.host, options.grpc_port, token)
            stack.push_async_callback(grpc.stop, LINGER_S)
            addresses.append(f"grpc://{host}:{grpc.port}")
        yield addresses


@contextlib.asynccontextmanager
async def _driving(args: Any, backend: Backend, served: Served) -> AsyncIterator[asyncio.Future]:
    """The driver at work, and versions followed; the future is done when it has ended by itself."""
    from jaxrl.cli.served import Follower

    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def watch(driver: Driver) -> None:
        def over() -> None:
            # One that another has replaced is no end of the server.
            if driver is backend.driver and not backend.reloading:
                loop.call_soon_threadsafe(_settle, ended, None, None)

        driver.add_done_callback(over)

    watch(served.driver)
    follower = None
    if args.options.follow:
        follower = Follower(args, served.parts, backend, on_driver=watch)
    try:
        yield ended
    finally:
        if follower is not None:
            follower.stop()
        with contextlib.suppress(DeadlineError):
            await _in_thread(lambda: backend.driver.stop(LINGER_S))


async def _drain(backend: Backend, grace_s: float) -> None:
    """No new requests; those that are there have `grace_s` seconds."""
    backend.draining = True
    left = backend.driver.stats()
    _say(f"stopping: {left.running} running and {left.waiting} waiting have {grace_s:g} s")
    if not await _in_thread(lambda: backend.driver.drain(grace_s)):
        left = backend.driver.stats()
        _say(f"cancelled after {grace_s:g} s: {left.running} running, {left.waiting} waiting")


def _watch_signals() -> asyncio.Future:
    """A future of the first SIGINT or SIGTERM; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    stopping = loop.create_future()

    def heard(signum: int) -> None:
        if stopping.done():
            os.write(2, b"jaxrl: error: interrupted again\n")
            os._exit(128 + signum)
        stopping.set_result(signum)

    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, heard, signum)
    return stopping


def _in_thread(function: Callable[[], Any]) -> asyncio.Future:
    """The result of a function that blocks. Nobody waits for the thread when the process ends."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def work() -> None:
        try:
            result, error = function(), None
        except BaseException as caught:
            result, error = None, caught
        # The loop may have ended in the meantime.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, future, result, error)

    threading.Thread(target=work, name="jaxrl-serve", daemon=True).start()
    return future


def _settle(future: asyncio.Future, result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _say(text: str) -> None:
    output.report(f"jaxrl: {text}\n")
