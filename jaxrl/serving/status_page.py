"""The status page, and the JSON that it shows."""

from __future__ import annotations

import functools
import importlib.resources
import secrets
import time
from typing import Any

from jaxrl.serving.backend import Backend
from jaxrl.serving.metrics import COUNTERS, GAUGES, Metrics


def status(backend: Backend, metrics: Metrics) -> dict[str, Any]:
    """What the page shows; while the model loads there is less of it."""
    shown: dict[str, Any] = {
        "state": backend.state,
        "model": backend.name,
        "uptime_s": round(time.time() - backend.created),
        "requests": dict(metrics.outcomes),
        "tokens_per_second": round(metrics.tokens_per_second(), 1),
    }
    if backend.driver is None:
        return shown
    driver, stats = backend.driver, backend.driver.stats()
    failure = driver.failure
    return shown | {
        "version": str(driver.version),
        "weight_version": {"number": driver.version.number, "digest": driver.version.digest},
        "live_versions": sorted(stats.live_versions),
        "max_waiting": backend.max_waiting,
        "max_length": driver.engine.max_length,
        "failure": None if failure is None else str(failure),
        **{name: getattr(stats, name) for name in (*GAUGES, *COUNTERS)},
    }


def page() -> tuple[str, dict[str, str]]:
    """The page and its headers: it may load nothing but its own JSON, wherever it is shown."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return _source().replace("NONCE", nonce), headers


@functools.cache
def _source() -> str:
    file = importlib.resources.files("jaxrl.serving").joinpath("status_page.html")
    return file.read_text(encoding="utf-8")
