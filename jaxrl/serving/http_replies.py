"""What goes over the wire: JSON, events, and errors in OpenAI's form."""

from __future__ import annotations

import json
from typing import Any, Literal

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from jaxrl.serving.backend import Backend
from jaxrl.serving.errors import RETRY_AFTER_S, message_of, status_of
from jaxrl.serving.weights_reply import version_object

CLIENT_LEFT = 499
"""What is counted, and never sent, where a client has left before its answer."""

DONE = "[DONE]"
Event = dict[str, Any] | Literal["[DONE]"] | None

EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    # Some proxies gather small answers first.
    "X-Accel-Buffering": "no",
}


def json_text(value: Any) -> str:
    """Strict JSON: what is no number is an error here, and not at the client."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def json_reply(
    value: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """A value as a response, which nobody keeps."""
    headers = {"Cache-Control": "no-store", **(headers or {})}
    return web.Response(
        text=json_text(value), status=status, content_type="application/json", headers=headers
    )


def event_bytes(event: Event) -> bytes:
    """A server-sent event."""
    text = event if isinstance(event, str) else json_text(event)
    return f"data: {text}\n\n".encode()


def error_object(error: Exception) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    status = status_of(error)
    return _error(
        message_of(error),
        status.type,
        getattr(error, "code", None) or status.code,
        getattr(error, "param", None),
    )


def failure(error: Exception, *, basic: bool) -> web.Response:
    """The response that says what is wrong. `basic`: a browser may ask for the token."""
    status, headers = status_of(error), {}
    if status.passes:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if status.http == 401:
        headers["WWW-Authenticate"] = 'Basic realm="jaxrl"' if basic else "Bearer"
    return json_reply(error_object(error), status=status.http, headers=headers)


def http_error(error: web.HTTPException) -> web.Response:
    """What aiohttp refuses, in the form of all other errors."""
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    code = error.reason.lower().replace(" ", "_") if error.status in (404, 405, 413) else None
    body = _error(error.reason, "invalid_request_error", code, None)
    return json_reply(body, status=error.status, headers=headers)


def metrics_reply(text: bytes) -> web.Response:
    """Metrics in the form that Prometheus asks for."""
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def model(backend: Backend) -> dict[str, Any]:
    """A model in the list of models; the server must be ready."""
    driver = backend.driver
    return {
        "id": backend.name,
        "object": "model",
        "created": backend.created,
        "owned_by": "jaxrl",
        "max_model_len": driver.engine.max_length,
        "weight_version": version_object(driver.version),
    }


def _error(message: str, kind: str, code: str | None, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
