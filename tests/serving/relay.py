"""A server between a client and a real one, which goes wrong as a test wants it to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import aiohttp
from aiohttp import web


class Relay:
    """Passes everything on to `target`, but for what is scripted.

    Of completions, `script` says what happens to the next ones: "cut" closes the connection, "hang"
    never answers, a number is a status, and a function makes another answer of the right one.
    `deaf` cuts whatever else is asked, `told` makes another answer of that about the weights.
    """

    def __init__(self, target: str):
        self._target = target
        self.script: list = []
        self.deaf = False
        self.told = lambda answer: answer
        self.bodies: list[dict] = []
        self.hanging = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._open())

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _open(self):
        self._session = aiohttp.ClientSession()
        application = web.Application()
        application.router.add_get("/v1/weights", self._weights)
        application.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _weights(self, request):
        if self.deaf:
            request.transport.abort()
        return await self._passed(request, None, self.told)

    async def _completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        step = self.script.pop(0) if self.script else None
        if step == "cut":
            request.transport.abort()
        if step == "hang":
            self.hanging.set()
            await asyncio.Event().wait()
        if isinstance(step, int):
            return web.json_response({"error": {"message": "as the test says"}}, status=step)
        return await self._passed(request, body, step or (lambda answer: answer))

    async def _passed(self, request, body, change=lambda answer: answer):
        url, headers = self._target + request.path_qs, {}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        async with self._session.request(
            request.method, url, json=body, headers=headers
        ) as response:
            changed = change(await response.json())
            text = changed if isinstance(changed, str) else json.dumps(changed)
            return web.Response(text=text, status=response.status)

    def stop(self):
        """Close it and its loop."""

        async def close():
            await self._runner.cleanup()
            await self._session.close()

        self._call(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@contextlib.contextmanager
def relay(target: str):
    """A relay before the server at `target`."""
    between = Relay(target)
    try:
        yield between
    finally:
        between.stop()
