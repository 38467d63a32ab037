"""What a server says of its weights: which they are, which come next, and what they mean.

A trainer whose samples are made here asks for it; see `jaxrl.serving.remote`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from jaxrl.serving.backend import Backend
from jaxrl.serving.errors import FieldError
from jaxrl.types import WeightVersion

MAX_WAIT_S = 30.0
LOOK_S, SEE_S = 0.1, 0.005
"""How often the run is looked at while somebody waits for a version, and how soon he is told."""


def version_object(version: WeightVersion) -> dict[str, Any]:
    """A version in an answer."""
    return {"number": version.number, "digest": version.digest}


async def weights_reply(backend: Backend, query: Mapping[str, str]) -> dict[str, Any]:
    """The answer of /v1/weights, also while the model loads.

    With `number`, `digest` and `wait_s` in the query it comes as soon as that version is served, a
    later one is there, or the wait is over; the run is looked at meanwhile. Raises `FieldError`.
    """
    wanted, wait_s = _wanted(query)
    deadline = time.monotonic() + wait_s
    ticket, look_at = None, 0.0
    while True:
        now = time.monotonic()
        if backend.follower is not None and now >= look_at:
            asked, look_at = backend.follower.look(), now + LOOK_S
            ticket = ticket or asked
        newest = None if ticket is None else backend.follower.newest(ticket)
        if wanted is None or now >= deadline or _settled(backend, wanted, newest):
            return _reply(backend, newest)
        await asyncio.sleep(SEE_S)


def _wanted(query: Mapping[str, str]) -> tuple[WeightVersion | None, float]:
    if "number" not in query:
        return None, 0.0
    try:
        number, wait_s = int(query["number"]), float(query.get("wait_s", "0"))
    except ValueError as error:
        raise FieldError(f"number and wait_s must be numbers: {str(error)[:80]}") from None
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise FieldError(f"wait_s={wait_s} must be from 0 to {MAX_WAIT_S:g}", "wait_s")
    return WeightVersion(number, query.get("digest", "")), wait_s


def _settled(backend: Backend, wanted: WeightVersion, newest: WeightVersion | None) -> bool:
    """Whether waiting longer would change nothing."""
    if newest is not None and newest != wanted and newest.number >= wanted.number:
        return True
    if backend.state != "ready":
        return backend.state != "loading"
    return not backend.follows or backend.driver.version == wanted


def _reply(backend: Backend, newest: WeightVersion | None) -> dict[str, Any]:
    reply: dict[str, Any] = {"object": "weights", "state": backend.state, "model": backend.name}
    driver, follower = backend.driver, backend.follower
    if driver is None:
        return reply
    return reply | {
        "serving": version_object(driver.version),
        "newest": None if newest is None else version_object(newest),
        "loading": None if follower is None else follower.loading,
        "problem": "" if follower is None else follower.problem,
        "follows": backend.follows,
        "max_length": driver.engine.max_length,
        "room": driver.engine.slots + (backend.max_waiting or driver.engine.slots),
        # Not those of the model before temperature, top-k and top-p, as elsewhere.
        "logprobs": "sampled",
        "model_meaning": dict(backend.model_meaning),
    }
