"""A real server on loopback, in a thread of the test's process, and what talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time

from jaxrl.data.chat import ChatPrompts
from jaxrl.serving.backend import Backend
from jaxrl.serving.http_server import start_http
from jaxrl.serving.metrics import Metrics

NAME = "tiny"


class Running:
    """A server that runs; `url` is where, `backend` and `metrics` are its own."""

    def __init__(self, backend: Backend, token: str | None = None):
        self.backend, self.token = backend, token
        self.metrics = backend.meter
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        starting = start_http(backend, "127.0.0.1", 0, token, self.metrics)
        self.server = self.call(starting)
        self.url = f"http://127.0.0.1:{self.server.port}"

    def call(self, coroutine):
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def request(self, method, path, body=None, headers=None):
        """(status, headers, body): an object, or text if it is no JSON. `body` is an object, or
        bytes to be sent as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        sent = {} if body is None else {"Content-Type": "application/json"}
        if self.token is not None:
            sent["Authorization"] = f"Bearer {self.token}"
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, raw, sent | (headers or {}))
            answer = connection.getresponse()
            text = answer.read().decode()
        kind = answer.headers.get_content_type()
        return (
            answer.status,
            answer.headers,
            json.loads(text) if kind == "application/json" else text,
        )

    def complete(self, **fields):
        """(status, body) of a completion."""
        status, _, body = self.request("POST", "/v1/completions", {"model": NAME, **fields})
        return status, body

    def events(self, path, **fields):
        """The events of a stream: objects, and the "[DONE]" at the end."""
        status, headers, text = self.request("POST", path, {"stream": True, **fields})
        assert status == 200, text
        assert headers.get_content_type() == "text/event-stream"
        parts = [part.removeprefix("data: ") for part in text.split("\n\n")[:-1]]
        return [part if part == "[DONE]" else json.loads(part) for part in parts]

    def stop(self):
        """Stop the server and its loop."""
        self.call(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()


@contextlib.contextmanager
def serving(driver, *, template=None, token=None, system="", **options):
    """A server over this driver (None: it still loads)."""
    backend = Backend(NAME, meter=Metrics(), **options)
    if driver is not None:
        chat = None if template is None else ChatPrompts(template, system)
        backend.open(driver, chat=chat)
    server = Running(backend, token)
    try:
        yield server
    finally:
        server.stop()


def until(condition, what="the condition"):
    """Wait until it is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.005)
